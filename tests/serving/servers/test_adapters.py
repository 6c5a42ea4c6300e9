"""LoRA adapters of a server: loaded while it runs, or refused with status 400."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.support.adapters import RANK, adapter, write
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXPERT = "model.layers.1.mlp.experts.0.up_proj"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    found = {"good": adapter(TINY_LLADA2, folder / "good", 1), "bad": folder / "bad"}
    found["bad"].mkdir()
    more = {
        f"base_model.model.{EXPERT}.lora_{part}.weight": torch.zeros(RANK, RANK) for part in "AB"
    }
    write(found["bad"], load_file(found["good"] / "adapter_model.safetensors") | more)
    return found


def load(server: Server, name: str, path: Path | str) -> httpx.Response:
    asked = {"lora_name": name, "lora_path": str(path)}
    return server.post("/v1/load_lora_adapter", **asked)


def test_loaded_and_refused(watched: Server, adapters: dict[str, Path]) -> None:
    base = watched.complete("sort 61 35 88 14", 16, temperature=0)["token_ids"]
    refused = load(watched, "bad", adapters["bad"])
    error: dict[str, Any] = refused.json()["error"]
    assert refused.status_code == error["code"] == 400 and error["type"] == "BadRequestError"
    assert EXPERT in error["message"] and "experts take no adapter" in error["message"]
    assert load(watched, "absent", "/nowhere/at-all").status_code == 404
    loaded = load(watched, "good", adapters["good"])
    assert loaded.status_code == 200 and "added successfully" in loaded.text
    asked = {"temperature": 0, "ignore_eos": True}
    assert watched.complete("sort 61 35 88 14", 16, **asked, model="good")["token_ids"] != base
    assert watched.complete("sort 61 35 88 14", 16, temperature=0)["token_ids"] == base
    names = [model["id"] for model in watched.client.get("/v1/models").json()["data"]]
    assert names == ["m", "good"]
