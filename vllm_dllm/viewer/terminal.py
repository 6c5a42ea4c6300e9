"""Show the passes of a trace in a terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text


class Kind(Enum):
    """The state of a position after a pass."""

    GIVEN = "given"  # the prompt's last tokens, or pinned
    OPEN = "open"  # not decided
    NOW = "now"  # decided in this pass
    BEFORE = "before"  # decided earlier
    EDITED = "edited"  # decided earlier, and changed in this pass


STYLES = {
    Kind.GIVEN: "dim",
    Kind.OPEN: "dim",
    Kind.NOW: "bold black on green",
    Kind.BEFORE: "",
    Kind.EDITED: "bold black on yellow",
}
# A position of a block: its state, and its token's id (None if it is open).
Cell = tuple[Kind, int | None]
# Marks that distinguish the kinds where there are no colours.
MARKS = {Kind.NOW: ("[", "]"), Kind.EDITED: ("{", "}")}
OPEN = "\u2591"
SECONDS = 0.25  # how long a frame is shown

# Control characters -> Unicode's symbols for them. Other characters that end a line, are half of
# one, or change the direction of the text after them -> the replacement character.
_UNSAFE = ((0x80, 0x9F), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
_VISIBLE = {
    **{control: 0x2400 + control for control in range(0x20)},
    0x7F: 0x2421,
    **{code: 0xFFFD for first, last in _UNSAFE for code in range(first, last + 1)},
}


def visible(text: str) -> str:
    """Replace control characters by symbols, so that a terminal shows them and does not act."""
    return text.translate(_VISIBLE)


class Frame(NamedTuple):
    """A block after one of its passes."""

    kind: str  # of the pass, see `tracing.trace.Pass`
    step: int  # denoise steps of the block so far
    passes: int  # of the block so far
    cells: list[Cell]  # one for each position

    @property
    def decided(self) -> int:
        """The number of positions that the model has decided."""
        return sum(kind not in (Kind.OPEN, Kind.GIVEN) for kind, _ in self.cells)


def frames(block: dict[str, Any]) -> Iterator[Frame]:
    """A frame for each pass of a block of a trace, which consists of plain values."""
    kinds = [Kind.OPEN] * block["width"]
    tokens: list[int | None] = [None] * block["width"]
    by_step = {
        step: list(events)
        for step, events in itertools.groupby(block["events"], lambda event: max(event["step"], 1))
    }
    for number, each in enumerate(block["passes"], 1):
        kinds = [_settled(kind) for kind in kinds]
        for event in by_step.get(each["step"], ()) if each["kind"] == "denoise" else ():
            at, token = event["position"], event["token"]
            if at in block["given"]:
                kinds[at] = Kind.GIVEN
            elif token is None:
                kinds[at] = Kind.OPEN
            else:
                kinds[at] = Kind.NOW if tokens[at] is None else Kind.EDITED
            tokens[at] = token
        cells = zip(kinds, tokens, strict=True)
        yield Frame(each["kind"], each["step"], number, list(cells))


def _settled(kind: Kind) -> Kind:
    return Kind.BEFORE if kind in MARKS else kind


class Screen:
    """Shows blocks one after the other, each pass by pass.

    If the output is not a terminal, frames are printed one below the other.
    """

    def __init__(self, console: Console, text_of: Callable[[int], str]) -> None:
        """Draw on a console; `text_of` gives a token id's text."""
        self.console, self.text_of = console, text_of
        self.passes = self.decided = 0
        self._above: list[Text] = []

    def show(self, number: int, block: dict[str, Any]) -> None:
        """Show the passes of a block; its number counts from 0."""
        every = list(frames(block))
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False, transient=True) as live:
                for frame in every:
                    live.update(self._drawn(number, frame), refresh=True)
                    time.sleep(SECONDS)
        else:
            for frame in every:
                self.console.print(self._drawn(number, frame))
        last = every[-1]
        self.passes += last.passes
        self.decided += last.decided
        self._above.append(self._line((_settled(kind), token) for kind, token in last.cells))

    def end(self) -> None:
        """Leave the whole answer on the screen, with its cost."""
        self.console.print(Text().join(self._above))
        self.console.print(self._status("all", self.passes, self.decided), style="bold")

    def _drawn(self, number: int, frame: Frame) -> Group:
        what = f"block {number + 1}, step {frame.step}, {frame.kind}"
        status = self._status(what, self.passes + frame.passes, self.decided + frame.decided)
        above = self._above if self.console.is_terminal else []
        return Group(*above, self._line(frame.cells), Text(status, style="bold"))

    @staticmethod
    def _status(what: str, passes: int, decided: int) -> str:
        return f"{what}: {passes} passes, {decided} tokens, {decided / max(passes, 1):.1f} a pass"

    def _line(self, cells: Iterable[Cell]) -> Text:
        line = Text()
        plain = self.console.no_color
        for kind, token in cells:
            text = OPEN if token is None else visible(self.text_of(token) or f"<{token}>")
            before, after = MARKS.get(kind, ("", "")) if plain else ("", "")
            line.append(before + text + after, style="" if plain else STYLES[kind])
        return line
