"""What a constraint may cost, and the error that says why one is refused."""

from __future__ import annotations

from dataclasses import dataclass

# Of an error's message, which may quote what was sent.
MOST_CHARACTERS = 1000


class ConstraintError(ValueError):
    """A constraint that is not served; the message is for the user who sent it."""

    def __init__(self, message: object) -> None:
        text = str(message)
        super().__init__(text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "...")


class BusyError(RuntimeError):
    """No verdict on a constraint: the same one may be compiled if it is sent again later."""


@dataclass(frozen=True)
class Limits:
    """Caps on a constraint; beyond any of them it is refused with that cap's number.

    Attributes:
        seconds: CPU time of a compilation. Wall time would refuse on a busy machine what it
            serves on an idle one.
        wall: seconds of wall time after which a compilation is given up without a verdict.
        wait: seconds that a constraint waits for its turn to be compiled.
        waiting: constraints that may wait for their turn, of all clients together.
        memory: bytes that the compiling process may add to what it has when it is idle.
        text: bytes of the constraint as it was sent.
        depth: how deeply a schema may nest.
        recursion: how often a definition may stand inside itself; the alternatives that would
            go deeper are not offered.
        pattern: characters of the regular expression that is handed to `outlines_core`.
        positions: byte positions of it, repetitions counted (its size as a nondeterministic
            automaton, roughly).
        byte_states: states of the automaton that reads bytes.
        cells: entries of the table from states and token classes to states.
        edges: pairs of states that a token leads between.
    """

    seconds: float = 1.5
    wall: float = 20.0
    wait: float = 5.0
    waiting: int = 256
    memory: int = 1 << 30
    text: int = 256 << 10
    depth: int = 64
    recursion: int = 4
    pattern: int = 4 << 20
    positions: int = 200_000
    byte_states: int = 16_000
    cells: int = 16 << 20
    edges: int = 400_000
