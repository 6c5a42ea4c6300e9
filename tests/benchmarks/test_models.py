"""The benchmark of whole models at their published sizes, and the floor of a step."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
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
    systems = {
        "LLaDA2.0-mini": {"1": {"ms": 5.0, "floor_ms": 4.0}},
        "DiffusionGemma": {
            "1": {"ms": 10.0, "floor_ms": None},
            "64": {"ms": 80.0, "floor_ms": 40.0},
        },
        "DiffusionGemma native": {"1": {"ms": 12.0, "floor_ms": None}},
    }
    rows = list(TABLES["real_size"].rows({"tokens_per_forward": 3.0, "systems": systems}))
    assert rows[1] == ["LLaDA2.0-mini", "1", "5.00", "4.00", "1.25", "200.0", "600", "-"]
    assert rows[2] == ["DiffusionGemma", "1", "10.00", "-", "-", "100.0", "-", "1.20x"]
    assert rows[3] == ["DiffusionGemma", "64", "80.00", "40.00", "2.00", "12.5", "-", "-"]
    assert rows[4] == ["DiffusionGemma native", "1", "12.00", "-", "-", "83.3", "-", "-"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
def test_the_published_sizes_script_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "real_size.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "real_size.py"), "--tiny", "--steps", "5"]
    command += ["--requests", "1", "3", "--context", "40", "--json", str(out)]
    command += ["--systems", "LLaDA2.0-mini", "DiffusionGemma"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    systems = json.loads(out.read_text())["results"]["systems"]
    for found in systems.values():
        assert [list(found), min(one["ms"] > 0 for one in found.values())] == [["1", "3"], True]
    assert "| LLaDA2.0-mini | 3 |" in done.stdout


def test_the_floor_of_one_request_by_hand() -> None:
    """One layer, one head, two experts of which each token takes both."""
    one = Attention(layers=1, heads=1, kv_heads=1, dim=4)
    model = Geometry(2, 8, 16, (one,), {}, experts=2, chosen=2, width=3, moe_layers=1)
    weights = 4 * 8 * 4 + 8 * 2 + 8 * 16 + 2 * 3 * 8 * 3  # attention, router, head, experts
    cost = real_size.floor(model, requests=1, context=6)
    assert cost.weight_bytes == 2 * weights
    assert cost.cache_bytes == 2 * 2 * 8 * 4  # keys and values of 6 + 2 positions
    assert cost.operations == 2 * 2 * weights + 2 * 2 * 2 * 8 * 4
