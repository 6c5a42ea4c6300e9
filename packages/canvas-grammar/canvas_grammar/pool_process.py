"""The process that compiles constraints: ``python -m canvas_grammar.pool_process DESCRIPTOR``.

It reads the vocabulary and then one constraint at a time from the connection whose file descriptor
it is given, and answers each (see `pool`). Each constraint is compiled in a fork of this process
whose memory the kernel limits, and as a last resort its CPU time: a library that a hostile
constraint keeps busy cannot be interrupted, but a process can be killed. The parent kills it, too,
with `INTERRUPT`, to let another constraint go first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.constraint import Constraint
from canvas_grammar.grammar.grammars import gbnf_parser
from canvas_grammar.grammar.regex import load_unicode_tables
from canvas_grammar.limits import CompileLimits, ConstraintError
from canvas_grammar.pool import COMPILED, INTERRUPT, INTERRUPTED, READY, REFUSED, PoolLimits

# Signals sent to a fork from outside; any other signal is caused by the constraint itself.
SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Compilations yield to the parent when the CPU is busy.
NICENESS = 5


def main() -> None:
    """Answer constraints until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    # If the machine runs out of memory, this is the first process that the kernel should kill.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(NICENESS)
    signal.signal(INTERRUPT, signal.SIG_IGN)  # it is sent to the whole group
    vocabulary, limits = connection.recv()
    # Forks share these tables and this parser, which take half a second of CPU time.
    load_unicode_tables()
    gbnf_parser()
    # Output that libraries print about a client's constraint does not belong in the server's log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send_bytes(READY)
        while True:
            constraint = connection.recv()
            fork = os.fork()
            if fork == 0:
                _run_in_fork(connection, constraint, vocabulary, limits)
            _, status = os.waitpid(fork, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == INTERRUPT:
                connection.send_bytes(INTERRUPTED)
            elif status != 0:
                connection.send_bytes(REFUSED + _cause_of_death(status, limits).encode())


def _run_in_fork(
    connection: Connection, constraint: Constraint, vocabulary: Vocabulary, limits: PoolLimits
) -> NoReturn:
    """Compile, send the answer and exit; control never returns to the caller's code."""
    status = 1
    try:
        signal.signal(INTERRUPT, signal.SIG_DFL)
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # The kernel kills this fork when it has used that much CPU time in all its threads.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        answer = compile_packed(constraint, vocabulary, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(INTERRUPT, signal.SIG_IGN)
        connection.send_bytes(answer)
        status = 0
    finally:
        os._exit(status)


def compile_packed(constraint: Constraint, vocabulary: Vocabulary, limits: PoolLimits) -> bytes:
    """The answer to a constraint, compiled in this process."""
    try:
        return COMPILED + compile_constraint(constraint, vocabulary, CompileLimits()).packed
    except ConstraintError as error:
        reason = str(error)
    except RecursionError:
        reason = "the constraint nests too deeply"
    except MemoryError:
        reason = _too_costly(_memory(limits))
    except BaseException as error:
        # A schema that breaks a library in an unforeseen way is refused, with no further effect. (A
        # panic of a library written in Rust is not an `Exception`.)
        reason = f"the constraint cannot be read ({type(error).__name__})"
    return REFUSED + reason.encode(errors="replace")


def _cause_of_death(status: int, limits: PoolLimits) -> str:
    """Why a fork ended without an answer, if its constraint is the cause.

    If it is not, this function ends the process, and there is no verdict on the constraint.
    """
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) in SIGNALS_FROM_OUTSIDE:
        raise SystemExit(1)
    if os.WTERMSIG(status) == signal.SIGPROF:
        return _too_costly(f"{limits.cpu_seconds:g} seconds of CPU time")
    # Libraries written in C abort where Python would raise `MemoryError`.
    return _too_costly(_memory(limits))


def _memory(limits: PoolLimits) -> str:
    return f"{limits.memory_bytes >> 20} MiB"


def _too_costly(limit: str) -> str:
    return f"the constraint takes more than {limit} to compile; make it smaller"


if __name__ == "__main__":
    main()
