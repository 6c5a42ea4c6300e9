"""The benchmark of whole models at their published sizes, and the floor of a step."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from benchmarks import real_size
from benchmarks.published import Attention, Geometry
from benchmarks.tables import TABLES
from tests.support.checkpoints import ROOT
from vllm_dllm.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion
from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig
from vllm_dllm.families.llada2.model import LLaDA2MoeModelLM


@pytest.mark.parametrize("name", ["LLaDA2.0-mini", "DiffusionGemma"])
def test_the_floor_counts_every_weight_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """With many tokens every expert is read, and of the embedding no more than the head is."""
    system = real_size.SYSTEMS[name]
    real_size.write_checkpoint(system, tmp_path / "model", tiny=False, layers=None)
    of_config, shapes_of = {
        "LLaDA2.0-mini": (LLaDA2MoeConfig, LLaDA2MoeModelLM.tensor_shapes),
        "DiffusionGemma": (AutoConfig, DiffusionGemmaForBlockDiffusion.tensor_shapes),
    }[name]
    shapes = shapes_of(of_config.from_pretrained(tmp_path / "model"))
    counted = {
        tensor: math.prod(shape)
        for tensor, shape in shapes.items()
        # Without norms and biases, and without the images' half.
        if len(shape) > 1 and "vision" not in tensor and "word_embeddings" not in tensor
    }
    if "lm_head.weight" not in counted:  # read as the head, and by self-conditioning
        counted["lm_head.weight"] = counted["model.embed_tokens.weight"]
    least = real_size.floor(system.geometry, requests=64, context=0)
    assert least.weight_bytes == pytest.approx(2 * sum(counted.values()))


def test_a_step_at_the_published_sizes_beside_vllm_s_class() -> None:
    def system(attention: str, requests: dict) -> dict:
        return {"engine": {"attention": attention}, "requests": requests}

    known = {"ms": 5.0, "floor_ms": 4.0, "tokens_per_s": 600.0, "idle_ms": 0.25}
    tiny = {"ms": 10.0, "floor_ms": None, "tokens_per_s": None}
    systems = {
        "LLaDA2.0-mini": system("TRITON_ATTN", {"1": known}),
        "DiffusionGemma": system("FLASH_ATTN 4", {"1": tiny, "64": {"failed": "OutOfMemory"}}),
        "DiffusionGemma native": system("FLASH_ATTN 4", {"1": tiny | {"ms": 12.0}}),
        "DiffusionGemma FP8": {"requests": {}, "failed": "an error", "log": []},
    }
    rows = list(TABLES["real_size"].rows({"systems": systems}))[1:]
    first = ["LLaDA2.0-mini", "TRITON_ATTN", "1", "5.00", "4.00", "1.25", "0.25", "600", "-"]
    assert rows[0] == first
    assert rows[1] == ["DiffusionGemma", "FLASH_ATTN 4", "1", "10.00", *"----", "1.20x"]
    assert len(rows) == 3


@pytest.mark.parametrize("routing", ["uniform", pytest.param("weights", marks=pytest.mark.long)])
@pytest.mark.engine
@pytest.mark.slow
def test_the_script_measures_in_small(routing: str, tmp_path: Path) -> None:
    out = tmp_path / "real_size.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "real_size.py"), "--tiny", "--steps", "5"]
    command += ["--requests", "1", "3", "--context", "40", "--json", str(out)]
    command += ["--systems", "LLaDA2.0-mini", "--option", "enforce_eager=true", "--variants"]
    command += ["--routing", routing, "--limit", "240"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["results"]["systems"]["LLaDA2.0-mini"]
    assert found["routing"] == "weights"  # vLLM's CPU build asks no router
    names = ["", *(f", {name}" for name in real_size.VARIANTS)]
    assert list(found["requests"]) == [f"{n}{name}" for n in (1, 3) for name in names]
    assert all(0 < one["p10_ms"] <= one["p90_ms"] for one in found["requests"].values())
    assert "| LLaDA2.0-mini | CPU_ATTN | 3 |" in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_system_that_fails_or_hangs_loses_only_itself(tmp_path: Path) -> None:
    """Neither reaches its first figure: one gets an unknown option, the other too little time."""
    out = tmp_path / "real_size.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "real_size.py"),
        "--tiny",
        "--json",
        str(out),
    ]
    for more, why in (
        (["--option", "no_such=1"], "an error"),
        (["--limit", "1"], "ended after 1 s"),
    ):
        done = subprocess.run(
            [*command, *more, "--systems", "LLaDA2.0-mini"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 1 and f"LLaDA2.0-mini: {why}" in done.stderr
        found = json.loads(out.read_text())["results"]["systems"]["LLaDA2.0-mini"]
        assert found["failed"] == why and found["requests"] == {}


def test_experts_are_chosen_evenly_and_anew_at_each_call() -> None:
    tables = real_size.ExpertTables()
    hidden, logits = torch.zeros(512, 8), torch.zeros(512, 16)
    ids = [tables.route_tokens(hidden, logits, 4, torch.int32)[1] for _ in range(3)]
    assert ids[0].shape == (512, 4) and ids[0].dtype == torch.int32
    assert not torch.equal(ids[0], ids[1])
    assert all(len(set(row.tolist())) == 4 for row in ids[2])
    assert torch.stack(ids).flatten().long().bincount(minlength=16).min() > 300


def test_the_floor_of_one_request_by_hand() -> None:
    """One layer, one head, two experts of which each token takes both."""
    one = Attention(layers=1, heads=1, kv_heads=1, dim=4)
    model = Geometry(2, 8, 16, (one,), {}, experts=2, chosen=2, width=3, moe_layers=1)
    weights = 4 * 8 * 4 + 8 * 2 + 8 * 16 + 2 * 3 * 8 * 3  # attention, router, head, experts
    cost = real_size.floor(model, requests=1, context=6)
    assert cost.weight_bytes == 2 * weights
    assert cost.cache_bytes == 2 * 2 * 8 * 4  # keys and values of 6 + 2 positions
    assert cost.operations == 2 * 2 * weights + 2 * 2 * 2 * 8 * 4


def test_heads_of_a_float8_model_have_two_bytes_and_half_of_the_arithmetic_is_free() -> None:
    one = Attention(layers=1, heads=1, kv_heads=1, dim=4)
    model = Geometry(2, 8, 16, (one,), {}, experts=2, chosen=2, width=3, moe_layers=1)
    wide, narrow = (real_size.floor(model, requests=1, context=0, width=w) for w in (2, 1))
    head = 2 * 8 * 16
    assert narrow.weight_bytes - head == (wide.weight_bytes - head) / 2
    assert narrow.operations + narrow.float8_operations == wide.operations
    slow = real_size.Card(bandwidth=1e30, rate=1e3)
    assert narrow.milliseconds(slow) == narrow.operations + narrow.float8_operations / 2
