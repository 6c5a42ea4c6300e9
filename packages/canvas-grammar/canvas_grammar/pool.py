"""A pool of processes that compiles each constraint only once.

Constraints wait for one of a few processes (`pool_process`), and those of the client that has used
the least time go first. If a constraint takes long while clients wait that have used less time, it
is interrupted, and starts again later with a longer share. The verdict on a constraint is an
automaton or a refusal. It is cached for when the same constraint is sent again. A `BusyError` is
not a verdict and is not cached: the constraint has waited too long, or its process was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.constraint import Constraint
from canvas_grammar.limits import ConstraintError

LOGGER = logging.getLogger("canvas_grammar")
COMPILER = "canvas_grammar.pool_process"
# An automaton takes between a hundred kilobytes and several megabytes, a refusal at most a
# kilobyte.
CACHE_BYTES, REFUSAL_BYTES = 256 << 20, 1 << 10
# A process that dies is replaced, and its constraint is compiled again.
ATTEMPTS = 2
# The first byte of what a process sends.
READY = b"."  # it has started
COMPILED = b"+"  # the packed automaton follows
REFUSED = b"-"  # the reason follows
INTERRUPTED = b"!"
INTERRUPT = signal.SIGUSR2
# After so many shares a constraint is interrupted for another one of the same client. One share is
# too little, because an interrupted constraint loses what was done.
OF_ONE_CLIENT = 5
# How often the pool checks whether a compilation should be interrupted.
LOOK_SECONDS = 0.2
CLOSED = "no more constraints are compiled: their pool is closed"


class BusyError(RuntimeError):
    """There is no verdict on a constraint; it may be compiled if it is sent again later."""


@dataclass(frozen=True)
class PoolLimits:
    """Limits on the cost of a constraint.

    Attributes:
        share_seconds: wall time that a constraint gets before others may interrupt it; twice as
            much each further time.
        cpu_seconds: CPU time after which a process is taken to be stuck. It is the last resort:
            steps and memory are counted, so that a verdict does not depend on the machine.
        memory_bytes: memory that the compiling process may use in addition to its idle size.
        wait_seconds: wall time for which an impatient caller waits while others are compiled.
    """

    share_seconds: float = 1.0
    cpu_seconds: float = 300.0
    memory_bytes: int = 512 << 20
    wait_seconds: float = 10.0


Outcome = CompiledConstraint | ConstraintError | BusyError


@dataclass(eq=False)
class _Job:
    """A constraint that waits or is being compiled."""

    key: bytes  # what its verdict is cached under
    constraint: Constraint
    until: float  # the time, by `time.monotonic`, at which its callers stop waiting
    share: float  # the seconds after which it may be interrupted
    clients: set[str] = field(default_factory=set)  # who has sent it
    future: Future[CompiledConstraint] = field(default_factory=Future)


class CompilerPool:
    """Compiles constraints for one vocabulary. It is thread-safe.

    Its processes start with the first constraint. They end with `close`, or with this process.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        limits: PoolLimits | None = None,
        processes: int = 2,
        logger: logging.Logger = LOGGER,
    ) -> None:
        """Prepare a pool; nothing is started yet.

        Args:
            read_vocabulary: called before a process starts, in a thread of the pool. If it raises
                a `ConstraintError`, no constraint is served.
            limits: what a constraint may cost.
            processes: the number of constraints that are compiled at a time.
            logger: gets what is ignored in a constraint, and that a process has ended.
        """
        self.limits, self._logger = limits or PoolLimits(), logger
        self._processes = [_Process(read_vocabulary, self.limits, logger) for _ in range(processes)]
        # Guards everything below. Reentrant, because the garbage collector may call `close`.
        self._lock = threading.Condition(threading.RLock())
        self._waiting: list[_Job] = []
        # The seconds that constraints of the clients of all jobs have taken.
        self._used: dict[str, float] = {}
        self._jobs: dict[bytes, _Job] = {}
        self._verdicts: OrderedDict[bytes, Future[CompiledConstraint]] = OrderedDict()
        self._verdict_bytes = 0
        self._started = self._closed = False

    def submit(
        self, constraint: Constraint, patient: bool = True, client: str = ""
    ) -> Future[CompiledConstraint]:
        """Return a future of the automaton; it is done immediately if the verdict is cached.

        The future raises `ConstraintError` if the constraint cannot be served, and `BusyError` if
        there is no verdict for a temporary reason.

        Args:
            constraint: what to compile.
            patient: wait for as long as it takes, not only for ``limits.wait_seconds``.
            client: who sends it; clients share the processes evenly.

        Raises:
            BusyError: the pool is closed.
        """
        key = hashlib.sha256(json.dumps(asdict(constraint)).encode()).digest()
        until = math.inf if patient else time.monotonic() + self.limits.wait_seconds
        with self._lock:
            if self._closed:
                raise BusyError(CLOSED)
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(key, constraint, until, self.limits.share_seconds)
                self._waiting.append(job)
                self._lock.notify()
                if not self._started:
                    self._started = True
                    for process in self._processes:
                        threading.Thread(target=self._serve, args=(process,), daemon=True).start()
            job.until = max(job.until, until)
            job.clients.add(client)
            self._used.setdefault(client, min(self._used.values(), default=0.0))
            return job.future

    def close(self) -> None:
        """Kill the processes. Constraints that are not compiled yet get a `BusyError`."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for process in self._processes:
            process.close()

    def _serve(self, process: _Process) -> None:
        """Compile one constraint at a time until the pool is closed."""
        while (job := self._next()) is not None:
            outcome: Outcome | None
            began = time.monotonic()
            try:
                if began > job.until:
                    waited = f"it has waited for {self.limits.wait_seconds:g} seconds"
                    raise BusyError(f"{waited} while others were compiled: busy, try again")
                outcome = process.compile(job.constraint, partial(self._must_yield, job))
            except (ConstraintError, BusyError) as error:
                outcome = error
            except Exception as error:  # whatever the error is, no caller may wait forever
                self._logger.exception("A constraint was not compiled.")
                outcome = BusyError(f"it was not compiled ({type(error).__name__}); try again")
            self._settle(job, outcome, time.monotonic() - began)

    def _next(self) -> _Job | None:
        """Wait for a constraint, and take the next; None once the pool is closed."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            now = time.monotonic()
            job = min(self._waiting, key=lambda job: (now <= job.until, self._rank(job)))
            self._waiting.remove(job)
            return job

    def _rank(self, job: _Job, seconds: float = 0.0) -> tuple[float, float]:
        """A job of lower rank goes first; `seconds` is how long it has run."""
        return min(map(self._used.__getitem__, job.clients)) + seconds, job.share

    def _must_yield(self, job: _Job, seconds: float) -> bool:
        """Whether a constraint that has run for so long must let another one go first."""
        with self._lock:
            own = self._rank(job, seconds)
            return any(
                self._rank(it) < own
                and seconds > job.share * (OF_ONE_CLIENT if it.clients & job.clients else 1)
                for it in self._waiting
            )

    def _settle(self, job: _Job, outcome: Outcome | None, seconds: float) -> None:
        """Cache a verdict, and resolve the future of every caller that waits for it.

        Without an outcome, because it was interrupted, the constraint waits again.
        """
        with self._lock:
            for client in job.clients:
                self._used[client] += seconds
            if outcome is None:
                job.share *= 2
                self._waiting.append(job)
                return
        if isinstance(outcome, CompiledConstraint) and outcome.facts.ignored:
            self._logger.info("%s", outcome.facts.remark())
        with self._lock:
            if isinstance(outcome, CompiledConstraint):
                job.future.set_result(outcome)
            else:
                job.future.set_exception(outcome)
            del self._jobs[job.key]
            active = set().union(*(other.clients for other in self._jobs.values()))
            self._used = {client: self._used[client] for client in active}
            if not isinstance(outcome, BusyError):
                self._verdicts[job.key] = job.future
                self._verdict_bytes += _size(job.future)
            while self._verdict_bytes > CACHE_BYTES and len(self._verdicts) > 1:
                self._verdict_bytes -= _size(self._verdicts.popitem(last=False)[1])


def _size(verdict: Future[CompiledConstraint]) -> int:
    return REFUSAL_BYTES if verdict.exception() else len(verdict.result().packed)


def start_process(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run a module whose argument is the file descriptor of the other end of a connection."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    return process, ours


class _Process:
    """A process that compiles one constraint at a time. It is started for the first constraint.

    It has a separate session: Linux divides CPU time between sessions first, so it gets its share
    next to a busy parent, and signals that a terminal sends to the parent do not reach it.
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], limits: PoolLimits, logger: logging.Logger
    ) -> None:
        self._read_vocabulary, self._limits, self._logger = read_vocabulary, limits, logger
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    def compile(
        self, constraint: Constraint, must_yield: Callable[[float], bool]
    ) -> CompiledConstraint | None:
        """Return the automaton of a constraint, or None if it was interrupted.

        `must_yield` is asked, with the seconds that it has taken, whether to interrupt it.

        Raises:
            ConstraintError: the constraint cannot be served.
            BusyError: the process was killed, and so was the next one; or it is closed.
        """
        for _ in range(ATTEMPTS):
            try:
                connection = self._connection or self._start()
                connection.send(constraint)
                began = time.monotonic()
                while not connection.poll(LOOK_SECONDS):
                    if must_yield(time.monotonic() - began):
                        self._signal(INTERRUPT)
                answer = connection.recv_bytes()
            except (EOFError, OSError) as error:
                self._kill()
                if not self._closed:
                    self._logger.warning("A process that compiles constraints has ended: %r", error)
                continue
            if answer[:1] == REFUSED:
                raise ConstraintError(answer[1:].decode())
            if answer == INTERRUPTED:
                return None
            return CompiledConstraint(answer[1:])
        raise BusyError("the process that compiled it was killed: busy, try again")

    def close(self) -> None:
        """Kill the process for good. A call of `compile` that is waiting raises `BusyError`."""
        self._closed = True
        self._kill()

    def _start(self) -> Connection:
        vocabulary = self._read_vocabulary()
        with self._lock:
            if self._closed:
                raise BusyError(CLOSED)
            self._process, ours = start_process(COMPILER)
            self._connection = ours
        ours.send((vocabulary, self._limits))
        ours.recv_bytes()  # until it is ready, it cannot be interrupted
        return ours

    def _signal(self, number: int) -> None:
        """Send a signal to the process and its fork."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        with self._lock:
            self._signal(signal.SIGKILL)
            process, self._process, self._connection = self._process, None, None
            if process is not None:
                process.wait()
