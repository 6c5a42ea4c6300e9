"""What the examples print with the tiny models."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.documents.commands import Command

# Example -> an expression that its whole output matches somewhere (a dot matches line ends, too).
OUTCOMES = {
    "extract_records.py": r"name='.*' age=\d+ city=",
    "images.py": r"question alone: (\d+) tokens.*"
    r"with the picture: (?!\1 )\d\d+ tokens.*random weights",
    "offline.py": r"64 \+ 28 -> 92\nsort 61 35 88 14 -> 14 35 61 88\n"
    r"copy diffusion2026 -> diffusion2026\n",
    "offline_batch.py": r"140/140",
    "own_algorithm.py": r"width  1: '40 71 23 97 52' in (1\d|2\d) steps\n"
    r"width  4: '40 71 23 97 52' in [2-9] steps\nwidth 32: '.*' in [12] steps\n",
    "several_algorithms.py": r"(\w[\w ]+ .*40 71 23 97 52\n){6}",
    "stream_prefix.py": r"whole blocks:.* 1 pieces,.*prefix:.* (?!1 )\d+ pieces,",
    "structured_output.py": r"64 \+ 28 +92\nsort 61 35 88 14 +14 35 61 88\n"
    r'Describe .*\{.?"name".*\n.*sum of numbers\. +\d+(\+\d+)+\n',
    "tools.py": r"temperature\(\{.*\}\) -> .*time_of_day\(\{.*\}\) -> .*answer: ",
}


def check_outcome(command: Command, output: str) -> None:
    """Compare what an example of the documentation prints, where it asks a tiny model."""
    names = [Path(word).name for word in command.words if word.startswith("examples/")]
    if names and "--model" not in command.words:
        assert re.search(OUTCOMES[names[0]], output, re.DOTALL), f"{command}\n{output[-2000:]}"
