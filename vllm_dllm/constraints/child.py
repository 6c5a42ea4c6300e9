"""The process that compiles constraints: greeted once, then a constraint in, an automaton out.

It may be stopped at any time, and it may not take the machine's memory.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import BinaryIO

from vllm_dllm.constraints.build import compiled
from vllm_dllm.constraints.frames import (
    DONE,
    REFUSED,
    frame,
    receive,
    unpack_constraint,
    unpack_greeting,
)
from vllm_dllm.constraints.limits import ConstraintError, Limits
from vllm_dllm.constraints.pattern import know_characters
from vllm_dllm.constraints.vocabulary import Vocabulary

NICENESS = 10


def main() -> None:
    """Serve standard input until it ends."""
    os.nice(NICENESS)
    source = sys.stdin.buffer
    # Whatever else prints must not get between the messages.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    greeting = receive(source)
    if greeting is None:
        return
    vocabulary, limits = unpack_greeting(greeting)
    know_characters()
    _bound_memory(limits.memory)
    _send(sink, DONE)
    while (request := receive(source)) is not None:
        _bound_time(limits.seconds)
        _send(sink, answer(request, vocabulary, limits))


def answer(request: bytes, vocabulary: Vocabulary, limits: Limits) -> bytes:
    """The automaton of a request, or why there is none."""
    try:
        return DONE + compiled(unpack_constraint(request), vocabulary, limits).to_bytes()
    except ConstraintError as error:
        reason = str(error)
    except RecursionError:
        reason = "the constraint nests too deeply"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A schema that nobody has thought of costs its sender an answer, not us the process.
        reason = f"the constraint cannot be read ({type(error).__name__})"
    except MemoryError:
        reason = f"the constraint is too large: it takes more than {limits.memory} bytes to compile"
    return REFUSED + reason.encode(errors="replace")


def _bound_memory(more: int) -> None:
    """Let this process have ``more`` bytes beside what it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _bound_time(seconds: float) -> None:
    """End this process if a request takes much longer: who asked may be gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + 2 * seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _send(sink: BinaryIO, payload: bytes) -> None:
    sink.write(frame(payload))
    sink.flush()


if __name__ == "__main__":
    main()
