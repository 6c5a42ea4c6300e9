"""Quantized checkpoints of SDAR, dense and with experts, through vLLM's own layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.quantize.files import quantize_checkpoint, scheme_named
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.serving.engines.test_quantized import (
    ROUNDING,
    experts_of,
    linear_layers,
    reference,
    solved,
)
from tests.support.checkpoints import TINY_SDAR
from tests.support.engine import engine, greedy
from tests.support.reference_sdar import random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HALF: dict[str, Any] = {"dtype": "bfloat16", "diffusion_config": None}
# A layer each, numbered from 1 as in `ROUNDING`; INT4 by groups of 32.
DENSE = {"fp8-dynamic": 1, "int8": 2, "w4a16": 3}
EXPERTS = {"fp8-dynamic": 0, "int8": 1}


def quantized(source: Path, out: Path, schemes: dict[str, int]) -> Path:
    quantize_checkpoint(
        source,
        out,
        [
            scheme_named(name, 32 if name == "w4a16" else None, rf"re:.*layers\.{layer}\..*")
            for name, layer in schemes.items()
        ],
        None,
    )
    return out


def examples() -> list[Example]:
    tokenizer = sdar_tokenizer()
    encoder = Encoder(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return [encoder(problem) for problem in held_out_set(8)]


def test_a_dense_checkpoint(tmp_path: Path) -> None:
    """A scheme a layer: each matrix is what the scheme's library says, and answers stay right."""
    path = quantized(TINY_SDAR, tmp_path / "quantized", DENSE)
    with engine(TINY_SDAR, 4, **HALF) as running:
        before = solved(running, examples())
    with engine(path, 4, **HALF) as running:
        after = solved(running, examples())
        exact = {name: weight.bfloat16() for name, weight in reference(path).items()}
        seen = set()
        for name, layer, matrix in linear_layers(running, exact):
            number = int(re.search(r"layers\.(\d)", name)[1])
            product, _ = layer(torch.eye(matrix.shape[1], dtype=torch.bfloat16))
            limit = ROUNDING[number] * matrix.float().abs() + 1e-6
            assert ((product.T.float() - matrix.float()).abs() <= limit).all(), name
            seen.add(number)
        assert seen == set(DENSE.values())
    assert after >= 0.9 * before, (after, before)
    assert before >= 0.8 * 56


def test_a_checkpoint_with_experts(tmp_path: Path) -> None:
    """Experts are used; and where ours stand in, they are what the scheme's library says.

    For processors with AMX vLLM has a kernel of its own, which keeps the experts as integers.
    """
    source = random_checkpoint(tmp_path / "source", experts=True, block=4)
    path = quantized(source, tmp_path / "quantized", EXPERTS)
    with engine(path, 4, **HALF) as running:
        exact = {name: weight.bfloat16() for name, weight in reference(path).items()}
        layers = experts_of(running)
        assert len(layers) == 2
        for name, layer in layers.items():
            if layer.w13_weight.dtype != torch.bfloat16:
                assert torch.cpu._is_amx_tile_supported(), "nothing else has a kernel for them"
                continue
            prefix = name.removesuffix(".routed_experts")
            for expert in range(layer.w13_weight.shape[0]):
                gate, up, down = (
                    exact[f"{prefix}.{expert}.{part}_proj"] for part in ("gate", "up", "down")
                )
                assert torch.equal(layer.w13_weight[expert], torch.cat([gate, up])), name
                assert torch.equal(layer.w2_weight[expert], down), name
        prompts = [[(7 * i + n) % 290 for i in range(20)] for n in range(4)]
        got = running.generate(prompts, [greedy(24, ignore_eos=True)] * 4)
        assert all(len(tokens) == 24 for tokens, _ in got)
        for layer in layers.values():
            layer.w2_weight.data.zero_()
        running.scheduler.reset_prefix_cache()
        assert running.generate(prompts, [greedy(24, ignore_eos=True)] * 4) != got
