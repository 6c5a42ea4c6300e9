"""What docs/clients.md says: its table, and the code of each client, on the page or in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "clients.md"
# As the page writes them: where the server is, and what it serves.
ADDRESS, MODEL = "http://localhost:8000", "MODEL"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^\| \[(.+?)\]\(\.\./(examples/clients/\w+\.py)\)", re.MULTILINE)
LINE = re.compile(r"^([a-z]+(?:, [a-z]+)?): (.*)$", re.MULTILINE)


class Block(NamedTuple):
    """A client's code: its language, and its text."""

    language: str
    text: str

    def at(self, address: str, model: str) -> str:
        """The text for another server. `address` is without a path."""
        return self.text.replace(ADDRESS, address).replace(MODEL, model)


def sections() -> dict[str, str]:
    """The text below each heading."""
    _, *parts = SECTION.split(PAGE.read_text("utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def blocks() -> dict[str, Block]:
    """The code of each client: of the file that the table links to, or of the client's section."""
    files = FILE.findall(PAGE.read_text("utf-8"))
    fences = {title: FENCE.search(text) for title, text in sections().items()}
    return {
        **{name: Block("python", (ROOT / path).read_text("utf-8")) for name, path in files},
        **{title: Block(*fence.groups()) for title, fence in fences.items() if fence},
    }


def table() -> dict[str, dict[str, str]]:
    """The rows of what works by the client's name, each by the heads of its columns."""
    lines = [line for line in sections()["What works"].splitlines() if line.startswith("| ")]
    heads, *clients = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    rows = [dict(zip(heads, client, strict=True)) for client in clients]
    return {row["client"].split("](")[0].lstrip("["): row for row in rows}


def printed(output: str) -> dict[str, str]:
    """What a block prints, by the word in front of it."""
    return dict(LINE.findall(output))
