"""Show the frames of a trace in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vllm_dllm.viewer.frames import Frame, Kind, frames, visible

STYLES = {
    Kind.GIVEN: "dim",
    Kind.OPEN: "dim",
    Kind.NOW: "bold black on green",
    Kind.BEFORE: "",
    Kind.EDITED: "bold black on yellow",
}
# Marks that distinguish the kinds where there are no colours.
MARKS = {Kind.NOW: ("[", "]"), Kind.EDITED: ("{", "}")}
OPEN = "\u2591"
SECONDS = 0.25  # how long a frame is shown


class Screen:
    """Shows blocks one after the other, each pass by pass.

    If the output is not a terminal, frames are printed one below the other.
    """

    def __init__(self, console: Console, text_of: Callable[[int], str], every: int = 1) -> None:
        """Make a screen.

        Args:
            console: where to draw.
            text_of: returns the text of a token id.
            every: n, to show only every n-th pass and the last one.
        """
        self.console = console
        self.text_of = text_of
        self.every = every
        self.passes = self.decided = 0
        self._above: list[Text] = []

    def show(self, number: int, block: dict[str, Any]) -> None:
        """Show the passes of a block; its number counts from 0."""
        all_frames = list(frames(block))
        kept = [f for f in all_frames if f.passes % self.every == 0 or f is all_frames[-1]]
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False, transient=True) as live:
                for frame in kept:
                    live.update(self._drawn(number, frame), refresh=True)
                    time.sleep(SECONDS)
        else:
            for frame in kept:
                self.console.print(self._drawn(number, frame))
        self.passes += len(all_frames)
        self.decided += all_frames[-1].decided if all_frames else 0
        if all_frames:
            last = all_frames[-1]
            cells = (replace(c, kind=Kind.BEFORE) if c.kind in MARKS else c for c in last.cells)
            self._above.append(self._cells(replace(last, cells=tuple(cells))))

    def end(self) -> None:
        """Leave the whole answer on the screen, with its cost."""
        self.console.print(Text().join(self._above))
        self.console.print(self._status("all", self.passes, self.decided), style="bold")

    def _drawn(self, number: int, frame: Frame) -> Group:
        what = f"block {number + 1}, step {frame.step}, {frame.kind}"
        status = self._status(what, self.passes + frame.passes, self.decided + frame.decided)
        above = self._above if self.console.is_terminal else []
        return Group(*above, self._cells(frame), Text(status, style="bold"))

    @staticmethod
    def _status(what: str, passes: int, decided: int) -> str:
        rate = decided / passes if passes else 0
        return f"{what}: {passes} passes, {decided} tokens, {rate:.1f} a pass"

    def _cells(self, frame: Frame) -> Text:
        line = Text()
        plain = self.console.no_color
        for cell in frame.cells:
            text = OPEN if cell.token is None else visible(self.text_of(cell.token))
            before, behind = MARKS.get(cell.kind, ("", "")) if plain else ("", "")
            line.append(before + text + behind, style="" if plain else STYLES[cell.kind])
        return line
