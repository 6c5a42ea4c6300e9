"""Define caps on a constraint, and the error that says why a constraint is not served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# Length of an error message, which may quote what a client sent.
MOST_CHARACTERS = 1000
# The steps that the compilation in this context may still take, and the most it may take.
_steps: ContextVar[list[int]] = ContextVar("steps")


class ConstraintError(ValueError):
    """A constraint that cannot be served. The message is for the user who sent it."""

    def __init__(self, message: object) -> None:
        text = str(message)
        super().__init__(text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "...")


@dataclass(frozen=True)
class CompileLimits:
    """Caps on a constraint. One that exceeds a cap is refused with a message that names the cap.

    They do not bound what `outlines_core` takes: see `pool`.

    Attributes:
        characters: length of the constraint as it was sent.
        depth: nesting depth of a schema.
        calls: how deeply calls of rules may nest, unless a request says otherwise. Texts that nest
            deeper are not offered.
        expression_characters: length of the regular expression that is passed to `outlines_core`.
        positions: byte positions of that expression with all repetitions counted.
        byte_states: states of the automata over bytes, without common endings.
        cells: entries of the table from states and kinds of tokens to what they do.
        window_states: the approximate number of states that a canvas is decoded with.
        steps: what all loops of a compilation may do together, see `spend`.
    """

    characters: int = 256 << 10
    depth: int = 64
    calls: int = 64
    expression_characters: int = 4 << 20
    positions: int = 200_000
    byte_states: int = 24_000
    cells: int = 48 << 20
    window_states: int = 2048
    steps: int = 20_000_000


@contextmanager
def counted(limits: CompileLimits) -> Iterator[list[int]]:
    """Count the steps of a compilation; yields how many are left, and the most."""
    steps = [limits.steps, limits.steps]
    token = _steps.set(steps)
    try:
        yield steps
    finally:
        _steps.reset(token)


def spend(steps: int) -> None:
    """Count steps of the compilation in this context, and refuse too many.

    One takes about a microsecond. Unlike time, their number does not depend on the machine.
    """
    if (left := _steps.get(None)) is not None:
        left[0] -= steps
        if left[0] < 0:
            raise ConstraintError(
                f"the constraint takes more than {left[1]} steps to compile; make it smaller"
            )
