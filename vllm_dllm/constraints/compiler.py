"""Compiling constraints in processes of their own, within a time limit, each only once.

A hostile constraint may take for ever inside a library that cannot be interrupted; a process can be
stopped. So constraints are compiled in a few processes that know the vocabulary, and one that is
too slow is replaced. Nothing here runs on an engine's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from vllm_dllm.constraints.build import Constraint
from vllm_dllm.constraints.frames import DONE, HEADER, frame, pack_constraint, pack_greeting
from vllm_dllm.constraints.limits import ConstraintError, Limits
from vllm_dllm.constraints.token_automaton import TokenAutomaton
from vllm_dllm.constraints.vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
# Automata that are kept; a hundred kilobytes to some megabytes each.
KEPT = 64


class LostError(Exception):
    """The process did not answer in time, or is gone."""


class Compiler:
    """Automata of constraints for one vocabulary. May be called from any thread."""

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits | None = None, processes: int = 2
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or Limits()
        self._greeting = pack_greeting(vocabulary, self.limits)
        self._idle: list[_Child] = []
        self._freed = threading.Condition()
        self._missing = processes
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="constraints")
        # What was found for each constraint: an automaton, or why there is none.
        self._found: OrderedDict[tuple[str, Constraint], Future[TokenAutomaton]] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start the processes now, so that the first request does not wait for them."""
        while True:
            with self._freed:
                if not self._missing or self._closed:
                    return
                self._missing -= 1
            self._add()

    def submit(self, constraint: Constraint) -> Future[TokenAutomaton]:
        """The automaton, later; compiled once for equal constraints.

        The future raises `ConstraintError` where there is none.
        """
        key = (self.vocabulary.fingerprint, constraint)
        with self._lock:
            known = self._found.get(key)
            if known is not None:
                self._found.move_to_end(key)
                return known
            future = self._threads.submit(self._compile, constraint)
            self._found[key] = future
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_if_lost(key, done))
        return future

    def compile(self, constraint: Constraint) -> TokenAutomaton:
        """The automaton, waited for.

        Raises:
            ConstraintError: it cannot be served, or not within the time limit.
        """
        return self.submit(constraint).result()

    def close(self) -> None:
        """Stop the processes."""
        with self._freed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._freed.notify_all()
        for child in idle:
            child.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget_if_lost(self, key: tuple[str, Constraint], done: Future[TokenAutomaton]) -> None:
        """A busy machine's verdict is not kept, nor a child that did not start."""
        error = CancelledError() if done.cancelled() else done.exception()
        if error is not None and type(error) is not ConstraintError:
            with self._lock:
                if self._found.get(key) is done:
                    del self._found[key]

    def _compile(self, constraint: Constraint) -> TokenAutomaton:
        child = self._take()
        try:
            answer = child.ask(pack_constraint(constraint), self.limits.seconds)
        except LostError as error:
            child.stop()
            with self._freed:
                self._missing += 1
            # The next constraint shall not wait for its start.
            threading.Thread(target=self.warm, daemon=True).start()
            raise _SlowError(
                f"the constraint took more than {self.limits.seconds:g} seconds or "
                f"{self.limits.memory >> 20} MiB to compile; make it smaller"
            ) from error
        self._give(child)
        if answer[:1] == DONE:
            return TokenAutomaton.from_bytes(answer[1:])
        raise ConstraintError(answer[1:].decode())

    def _take(self) -> _Child:
        until = time.monotonic() + START_SECONDS
        while True:
            with self._freed:
                if self._closed:
                    raise _SlowError("constraints are no longer compiled: the server is closing")
                if self._idle:
                    return self._idle.pop()
                if not self._missing and not self._freed.wait(until - time.monotonic()):
                    raise _SlowError("the processes that compile constraints do not answer")
            self.warm()

    def _add(self) -> None:
        try:
            child = _Child(self._greeting)
        except BaseException:
            with self._freed:
                self._missing += 1
                self._freed.notify_all()
            raise
        self._give(child)

    def _give(self, child: _Child) -> None:
        with self._freed:
            if not self._closed:
                self._idle.append(child)
                self._freed.notify()
                return
        child.stop()


class _SlowError(ConstraintError):
    """A refusal that may be another one on another day."""


class _Child:
    """A process that compiles; one question at a time."""

    def __init__(self, greeting: bytes) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_dllm.constraints.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        )
        try:
            self.ask(greeting, START_SECONDS)
        except LostError as error:
            self.stop()
            raise RuntimeError("the process that compiles constraints did not start") from error

    def ask(self, payload: bytes, seconds: float) -> bytes:
        """The answer to a message.

        Raises:
            LostError: there is none within so many seconds.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise TypeError("the process has no pipes")
        until = time.monotonic() + seconds
        try:
            stdin.write(frame(payload))
            stdin.flush()
            (size,) = HEADER.unpack(_read(stdout.fileno(), HEADER.size, until))
            return _read(stdout.fileno(), size, until)
        except OSError as error:
            raise LostError from error

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # What could not be written is of no use any more.
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()


def _read(descriptor: int, size: int, until: float) -> bytes:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    pieces, missing = [], size
    while missing:
        left = until - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            raise LostError
        piece = os.read(descriptor, min(missing, 1 << 20))
        if not piece:
            raise LostError
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
