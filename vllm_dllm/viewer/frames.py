"""Turn a trace into frames: one for what is visible after each pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Characters that end a line, are half of one, or change the direction of the text after them.
_UNSAFE = re.compile("[\u0080-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Kind(Enum):
    """The state of a position after a pass."""

    GIVEN = "given"  # the prompt's last tokens, or pinned
    OPEN = "open"  # not decided
    NOW = "now"  # decided in this pass
    BEFORE = "before"  # decided earlier
    EDITED = "edited"  # decided earlier, and changed in this pass


@dataclass(frozen=True)
class Cell:
    """A position of a block: its state, and its token's id (None if it is open)."""

    kind: Kind
    token: int | None


@dataclass(frozen=True)
class Frame:
    """A block after one of its passes.

    Attributes:
        kind: the kind of the pass, see `tracing.trace.Pass`.
        step: number of denoise steps of the block so far.
        passes: number of passes of the block so far.
        cells: one for each position.
    """

    kind: str
    step: int
    passes: int
    cells: tuple[Cell, ...]

    @property
    def decided(self) -> int:
        """How many positions the model has decided."""
        return sum(cell.kind not in (Kind.OPEN, Kind.GIVEN) for cell in self.cells)


def frames(block: dict[str, Any]) -> Iterator[Frame]:
    """A frame for each pass of a block of a trace, which consists of plain values."""
    held: dict[int, int] = {}
    given = set(block["given"])
    events = list(block["events"])
    for number, each in enumerate(block["passes"], 1):
        new: dict[int, Kind] = {}
        denoises = each["kind"] == "denoise"
        while denoises and events and events[0]["step"] <= each["step"]:
            event = events.pop(0)
            position, token = event["position"], event["token"]
            if token is None:
                held.pop(position, None)
                continue
            new[position] = Kind.EDITED if position in held else Kind.NOW
            held[position] = token
        yield Frame(
            each["kind"],
            each["step"],
            number,
            tuple(Cell(_kind(at, held, given, new), held.get(at)) for at in range(block["width"])),
        )


def _kind(position: int, held: dict[int, int], given: set[int], new: dict[int, Kind]) -> Kind:
    if position in given:
        return Kind.GIVEN
    if position not in held:
        return Kind.OPEN
    return new.get(position, Kind.BEFORE)


def visible(text: str) -> str:
    """Replace control characters by symbols, so that a terminal shows them and does not act."""
    shown = _CONTROL.sub(lambda found: _symbol(ord(found[0])), text)
    return _UNSAFE.sub("\ufffd", shown)


def _symbol(control: int) -> str:
    """Unicode's symbol for a control character."""
    return chr(0x2421 if control == 0x7F else 0x2400 + control)
