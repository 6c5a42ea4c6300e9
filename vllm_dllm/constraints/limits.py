"""What compiling a constraint may cost, and the errors that say why one is not served."""

from __future__ import annotations

from dataclasses import dataclass

# Length of an error message, which may quote what a client sent.
MOST_CHARACTERS = 1000


class ConstraintError(ValueError):
    """A constraint that cannot be served. The message is for the user who sent it."""

    def __init__(self, message: object) -> None:
        text = str(message)
        super().__init__(text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "...")


class BusyError(RuntimeError):
    """There is no verdict on a constraint: it may be compiled if it is sent again later."""


@dataclass(frozen=True)
class CompileLimits:
    """Caps on a constraint. One that exceeds a cap is refused with a message that names the cap.

    Attributes:
        cpu_seconds: CPU time of a compilation. A cap on wall time would refuse on a busy machine
            what it serves on an idle one.
        wait_seconds: wall time that a constraint may wait for others to be compiled, if whoever
            sent it is not patient.
        memory_bytes: memory that the compiling process may use on top of what it has when idle.
        characters: length of the constraint as it was sent.
        depth: nesting depth of a schema.
        calls: calls of rules that may be open inside each other, unless a request says otherwise.
            Texts that nest deeper are not offered.
        expression_characters: length of the regular expression that is given to `outlines_core`.
        positions: byte positions of that expression with all repetitions counted, which is
            roughly its size as a nondeterministic automaton.
        byte_states: states of the automata over bytes, without common endings.
        cells: entries of the table from states and kinds of tokens to what they do.
        window_states: about how many states a canvas is decoded with.
    """

    cpu_seconds: float = 1.5
    wait_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    characters: int = 256 << 10
    depth: int = 64
    calls: int = 64
    expression_characters: int = 4 << 20
    positions: int = 200_000
    byte_states: int = 24_000
    cells: int = 48 << 20
    window_states: int = 2048
