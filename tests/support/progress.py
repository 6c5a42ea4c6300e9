"""Progress of a long run, on a terminal or in a file."""

from __future__ import annotations

import sys
import time

LINE_SECONDS = 10.0  # between two lines, where the output is a file


class Progress:
    """One line that renews itself; where the output is a file, a line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.begin = self.said = time.monotonic()

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now, terminal = time.monotonic(), sys.stdout.isatty()
        last = self.done == self.total
        if now - self.said < (0.2 if terminal else LINE_SECONDS) and not last:
            return
        self.said = now
        text = f"{self.label}: {self.done} of {self.total}, {now - self.begin:.0f} s"
        print(f"\r\033[K{text}" if terminal else text, end="\n" if last or not terminal else "")
        sys.stdout.flush()
