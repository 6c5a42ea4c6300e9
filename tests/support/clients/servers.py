"""The clients of docs/clients.md: their code, servers for it, and what it must print there."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import jsonschema

from tests.support.checkpoints import ROOT
from tests.support.server import Server

PAGE = ROOT / "docs" / "clients.md"
# As the page writes them: where the server is, and what it serves.
ADDRESS, MODEL = "http://localhost:8000", "MODEL"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^\| \[(.+?)\]\(\.\./(examples/clients/\w+\.py)\)", re.MULTILINE)
LINE = re.compile(r"^([a-z]+(?:, [a-z]+)?): (.*)$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    text: str

    def at(self, address: str, model: str) -> str:
        """The text for another server. `address` is without a path."""
        return self.text.replace(ADDRESS, address).replace(MODEL, model)


def sections() -> dict[str, str]:
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


def printed(output: str) -> dict[str, str]:
    return dict(LINE.findall(output))


CHECKPOINTS = ROOT / "examples" / "tiny" / "checkpoints"
# A family's tiny checkpoint, and the parser of its calls.
FAMILIES = {
    "llada2": ("tiny-llada2", "hermes"),
    "gemma": ("tiny-diffusiongemma", "gemma4"),
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
}
# By the word in front of it: what a block prints. Without an entry it is a person as JSON, and for
# those in EITHER it may be one.
EXPECTED = {
    "chat": "92",  # the sum of 64 and 28, which the tiny models know
    "stream": "92",
    "responses": "92",
    "options": "92",
    "completion": "[1-8] tokens",
    "choice": "yes|no",
    "regex": r"\d{4}-\d{2}-\d{2}",
    "grammar": r"\d(\+\d)*",
}
EITHER = ("stream", "options")
WORD, MISSPELT, COMPLAINT = "diffusion_max_steps", "diffusion_max_step", "did you mean"


def serve(family: str, log: Path) -> Server:
    """A server with the flags of docs/clients.md, under the path of its checkpoint."""
    name, parser = FAMILIES[family]
    calls = ("--enable-auto-tool-choice", "--tool-call-parser", parser)
    checkpoint = CHECKPOINTS / name
    return Server(checkpoint, *calls, "--served-model-name", str(checkpoint), log=log)


def run_here(block: Block, address: str, model: str) -> str:
    """What a block of Python prints; it runs in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(block.at(address, model), "client", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def misspell(block: Block) -> Block:
    """The block with an option that no algorithm has, which a server refuses if it gets it."""
    assert WORD in block.text
    return block._replace(text=block.text.replace(WORD, MISSPELT))


def check(output: str) -> None:
    found = printed(output)
    assert "chat" in found, output
    for word, text in found.items():
        if word not in EXPECTED or (word in EITHER and text.startswith("{")):
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert re.fullmatch(EXPECTED[word], text), f"{word}: {text}"
