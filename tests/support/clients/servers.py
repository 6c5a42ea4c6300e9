"""Servers for the blocks of docs/clients.md, and what each block must print there."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import jsonschema

from tests.support.checkpoints import ROOT
from tests.support.clients.page import Block, printed
from tests.support.server import Server

CHECKPOINTS = ROOT / "examples" / "tiny" / "checkpoints"
# A family's tiny checkpoint, and the parser of its calls.
FAMILIES = {
    "llada2": ("tiny-llada2", "hermes"),
    "sdar": ("tiny-sdar", "hermes"),
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
    """Judge what a block printed."""
    found = printed(output)
    assert "chat" in found, output
    for word, text in found.items():
        if word not in EXPECTED or (word in EITHER and text.startswith("{")):
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert re.fullmatch(EXPECTED[word], text), f"{word}: {text}"
