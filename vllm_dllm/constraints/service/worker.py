"""The process that compiles constraints: ``python -m vllm_dllm.constraints.service.worker``.

It reads a greeting and then one constraint after the other from standard input, and answers each
on standard output (see `protocol`). Each constraint is compiled in a fork of this process whose CPU
time and memory are limited. This process measures the fork's CPU time and kills it when it has used
up its limit. So a constraint that is too slow does not cost a new start of the worker, and the
verdict on it does not depend on how busy the machine is.

A fork that has used more CPU time than most constraints take gives way: from then on it gets about
a quarter of a core that others want, and all of one that nobody wants. So a client with hostile
constraints slows the steps of an engine less.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from typing import BinaryIO, NoReturn

from vllm_dllm.constraints.automaton.compilation import compile_constraint
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.grammar.ebnf import load_notation
from vllm_dllm.constraints.grammar.regex import load_unicode_tables
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError
from vllm_dllm.constraints.service.protocol import (
    COSTLY,
    DONE,
    KILLED,
    REFUSED,
    frame,
    receive,
    unpack_constraint,
    unpack_greeting,
)

# Signals by which somebody else stops a fork; any other one is caused by the constraint itself.
SIGNALS_FROM_OUTSIDE = {
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
}
TICKS = os.sysconf("SC_CLK_TCK")
# After so much CPU time a fork gives way, by this much niceness.
FAIR_SECONDS, NICENESS = 0.5, 5
DIE_WITH_PARENT = 1  # `PR_SET_PDEATHSIG` of Linux
# Seconds between two looks at the CPU time of a fork that has almost used up its limit.
SHORTEST_WAIT = 0.02


def main() -> None:
    """Answer messages from standard input until it ends."""
    source = sys.stdin.buffer
    # Anything that a library prints goes to standard error, and never between the messages.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    greeting = receive(source)
    if greeting is None:
        return
    vocabulary, limits = unpack_greeting(greeting)
    load_unicode_tables()
    load_notation()
    _send(sink, DONE)
    while (request := receive(source)) is not None:
        _send(sink, answer_from_fork(request, vocabulary, limits))


def answer_from_fork(request: bytes, vocabulary: Vocabulary, limits: CompileLimits) -> bytes:
    """The answer to a request, which is compiled in a fork of this process."""
    reader, writer = os.pipe()
    parent, fork = os.getpid(), os.fork()
    if fork == 0:
        _stand_alone(parent)
        _run_in_fork(writer, request, vocabulary, limits)
    os.close(writer)
    try:
        answer = _read_until_exit(reader, fork, limits.cpu_seconds)
    finally:
        os.close(reader)
        _, status = os.waitpid(fork, 0)
    if answer is None:
        reason = (
            f"the constraint takes more than {limits.cpu_seconds:g} seconds of CPU time to compile"
        )
        return COSTLY + f"{reason}; make it smaller".encode()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return answer
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in SIGNALS_FROM_OUTSIDE:
        return KILLED
    # Libraries written in C abort where Python would raise `MemoryError`.
    return COSTLY + _too_large(limits).encode()


def _stand_alone(parent: int) -> None:
    """In a fork: a session of its own, whose share of CPU time is its own, but no other life."""
    if ctypes.CDLL(None).prctl(DIE_WITH_PARENT, int(signal.SIGKILL)) != 0 or os.getppid() != parent:
        os._exit(1)
    os.setsid()


def _give_way(fork: int) -> None:
    """Let others have the CPU first; where Linux divides it between sessions, other sessions."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, fork, NICENESS)
    with contextlib.suppress(OSError), open(f"/proc/{fork}/autogroup", "w") as file:
        file.write(str(NICENESS))


def compile_request(request: bytes, vocabulary: Vocabulary, limits: CompileLimits) -> bytes:
    """The answer to a request, compiled in this process: the automaton, or why there is none."""
    try:
        return DONE + compile_constraint(unpack_constraint(request), vocabulary, limits).packed
    except ConstraintError as error:
        reason = str(error)
    except RecursionError:
        reason = "the constraint nests too deeply"
    except MemoryError:
        return COSTLY + _too_large(limits).encode()
    except BaseException as error:
        # A schema that breaks a library in an unforeseen way is refused and does nothing worse.
        # (A panic of a library written in Rust is not an `Exception`.)
        reason = f"the constraint cannot be read ({type(error).__name__})"
    return REFUSED + reason.encode(errors="replace")


def _too_large(limits: CompileLimits) -> str:
    megabytes = limits.memory_bytes >> 20
    return f"the constraint takes more than {megabytes} MiB to compile; make it smaller"


def _run_in_fork(
    writer: int, request: bytes, vocabulary: Vocabulary, limits: CompileLimits
) -> NoReturn:
    """Compile, write the answer and exit; control never returns to the parent's code."""
    status = 1
    try:
        # Close the parent's pipes: the messages are not for this fork, and as long as it holds them
        # open, nobody would notice that its parent was killed.
        os.closerange(0, 2)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        # If the machine runs out of memory, this is the first process that it should kill.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        # If its parent is gone, nobody measures its CPU time any more: then the kernel ends it.
        signal.setitimer(signal.ITIMER_PROF, 2 * limits.cpu_seconds)
        _limit_memory(limits.memory_bytes)
        unsent = memoryview(compile_request(request, vocabulary, limits))
        while unsent:
            unsent = unsent[os.write(writer, unsent) :]
        status = 0
    finally:
        os._exit(status)


def _read_until_exit(reader: int, fork: int, seconds: float) -> bytes | None:
    """All that a fork writes; None if it was killed because it used up its CPU time."""
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    pieces: list[bytes] = []
    fair = True
    while (remaining := seconds - (used := cpu_seconds(fork))) > 0:
        if fair and used >= FAIR_SECONDS:
            fair = False
            _give_way(fork)
        # It cannot have used up its CPU time before that much wall time has passed.
        until = min(remaining, FAIR_SECONDS - used) if fair else remaining
        if not waiting.poll(1000 * max(until, SHORTEST_WAIT)):
            continue
        piece = os.read(reader, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    os.kill(fork, signal.SIGKILL)
    return None


def cpu_seconds(process: int) -> float:
    """CPU time that a process has used in all its threads; 0 if it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The fields after the name, which may contain anything.
            values = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / TICKS


def _limit_memory(extra: int) -> None:
    """Limit this process to `extra` bytes of address space on top of what it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(sink: BinaryIO, payload: bytes) -> None:
    sink.write(frame(payload))
    sink.flush()


if __name__ == "__main__":
    main()
