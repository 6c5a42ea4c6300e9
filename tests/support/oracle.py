"""The golden vectors beside the project (``../shared/oracle``), as typed records.

They are read in place. Where they are absent, tests that need them skip and say so.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracle"


@dataclass(frozen=True)
class Prompt:
    """A prompt and golden logits rows (`logits[kind]`: block_start, rows, values)."""

    id: str
    tokens: list[int]
    logits: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One golden generation: what was asked, what came out, and every canvas on the way."""

    id: str
    prompt: str
    kind: str
    params: dict[str, Any]
    output: list[int]
    finish_reason: str
    blocks: list[dict[str, Any]]
    robust: bool


@dataclass(frozen=True)
class Checkpoint:
    """A golden checkpoint: its directory and its records."""

    name: str
    path: Path
    block_size: int
    mask_token_id: int
    prompts: dict[str, Prompt]
    cases: list[Case]


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    path = ORACLE / name
    if not (path / "golden.json").exists():
        pytest.skip(f"golden vectors absent: ../shared/oracle/{name} is not beside the project")
    golden = json.loads((path / "golden.json").read_text())
    prompts = {p["id"]: Prompt(p["id"], p["tokens"], p["logits"]) for p in golden["prompts"]}
    names = Case.__dataclass_fields__
    cases = [Case(**{name: case[name] for name in names}) for case in golden["cases"]]
    return Checkpoint(name, path, golden["block_size"], golden["mask_token_id"], prompts, cases)


def robust_primary(golden: Checkpoint, algorithm: str) -> list[Case]:
    """The cases that a float32 implementation must reproduce token for token."""
    return [
        case
        for case in golden.cases
        if case.kind == "primary" and case.robust and case.params["algorithm"] == algorithm
    ]
