"""The process that compiles constraints: greeted once, then a constraint in, an automaton out.

Each constraint is compiled by a worker, a fork of this process, which may use so much CPU time and
memory and no more. This process counts the worker's CPU time and stops it. So a constraint that is
too slow costs no new start, and its verdict does not depend on what else the machine does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from typing import BinaryIO, NoReturn

from vllm_dllm.constraints.automaton.compilation import compiled
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.grammar.regex import know_characters
from vllm_dllm.constraints.limits import ConstraintError, Limits
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

# How a process ends that somebody stops; every other signal is the constraint's own doing.
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
TICKS = os.sysconf("SC_CLK_TCK")
# Wall time between two looks at a worker that has almost used up its CPU time.
SHORTEST_LOOK = 0.02


def main() -> None:
    """Serve standard input until it ends."""
    source = sys.stdin.buffer
    # Whatever else prints must not get between the messages.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    greeting = receive(source)
    if greeting is None:
        return
    vocabulary, limits = unpack_greeting(greeting)
    know_characters()
    _send(sink, DONE)
    while (request := receive(source)) is not None:
        _send(sink, worked(request, vocabulary, limits))


def worked(request: bytes, vocabulary: Vocabulary, limits: Limits) -> bytes:
    """The answer to a request, from a worker of its own."""
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        _work(writer, request, vocabulary, limits)
    os.close(writer)
    try:
        answer = _gathered(reader, worker, limits.seconds)
    finally:
        os.close(reader)
        _, status = os.waitpid(worker, 0)
    if answer is None:
        reason = f"the constraint takes more than {limits.seconds:g} seconds of CPU time to compile"
        return COSTLY + f"{reason}; make it smaller".encode()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return answer
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in FROM_OUTSIDE:
        return KILLED
    # The libraries in C abort where Python raises `MemoryError`.
    return COSTLY + _too_large(limits).encode()


def answer(request: bytes, vocabulary: Vocabulary, limits: Limits) -> bytes:
    """The automaton of a request, or why there is none."""
    try:
        return DONE + compiled(unpack_constraint(request), vocabulary, limits).to_bytes()
    except ConstraintError as error:
        reason = str(error)
    except RecursionError:
        reason = "the constraint nests too deeply"
    except MemoryError:
        return COSTLY + _too_large(limits).encode()
    except BaseException as error:
        # A schema that nobody has thought of costs its sender an answer. (What a library in Rust
        # raises is no `Exception`.)
        reason = f"the constraint cannot be read ({type(error).__name__})"
    return REFUSED + reason.encode(errors="replace")


def _too_large(limits: Limits) -> str:
    megabytes = limits.memory >> 20
    return f"the constraint takes more than {megabytes} MiB to compile; make it smaller"


def _work(writer: int, request: bytes, vocabulary: Vocabulary, limits: Limits) -> NoReturn:
    """What a worker does; it never goes on with what its parent does."""
    status = 1
    try:
        # The messages are its parent's. Without these a parent that is killed is seen to be gone.
        os.closerange(0, 2)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        # If the machine runs out of memory, this is what it can do without.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        # Should its parent be gone, nobody counts: then the kernel ends it.
        signal.setitimer(signal.ITIMER_PROF, 2 * limits.seconds)
        _bound_memory(limits.memory)
        found = memoryview(answer(request, vocabulary, limits))
        while found:
            found = found[os.write(writer, found) :]
        status = 0
    finally:
        os._exit(status)


def _gathered(reader: int, worker: int, seconds: float) -> bytes | None:
    """What a worker writes until it ends; None if it was stopped because of its CPU time."""
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    pieces: list[bytes] = []
    while (left := seconds - cpu_seconds(worker)) > 0:
        # It cannot use more CPU time than passes.
        if not waiting.poll(1000 * max(left, SHORTEST_LOOK)):
            continue
        piece = os.read(reader, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    os.kill(worker, signal.SIGKILL)
    return None


def cpu_seconds(process: int) -> float:
    """The CPU time that a process has used, all its threads together; 0 where it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # Behind the name, which may hold anything.
            values = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / TICKS


def _bound_memory(more: int) -> None:
    """Let this process have ``more`` bytes beside what it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _send(sink: BinaryIO, payload: bytes) -> None:
    sink.write(frame(payload))
    sink.flush()


if __name__ == "__main__":
    main()
