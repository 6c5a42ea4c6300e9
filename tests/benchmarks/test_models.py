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


@pytest.mark.slow
@pytest.mark.long
def test_a_system_that_fails_or_hangs_loses_only_itself(tmp_path: Path) -> None:
    """Neither reaches its first figure: one gets an unknown option, the other too little time."""
    out = tmp_path / "real_size.json"
    script = str(ROOT / "benchmarks" / "real_size.py")
    command = [sys.executable, script, "--tiny", "--json", str(out)]
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
