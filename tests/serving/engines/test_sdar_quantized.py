"""Quantized checkpoints of SDAR, dense and with experts, through vLLM's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.quantize.files import quantize_checkpoint, scheme_named
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.serving.engines.test_quantized import (
    check_experts,
    check_linear_layers,
    experts_of,
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
        check_linear_layers(running, exact, set(DENSE.values()))
    assert after >= 0.9 * before, (after, before)
    assert before >= 0.8 * 56


def test_a_checkpoint_with_experts(tmp_path: Path) -> None:
    """Experts are used; and where ours stand in, they are what the scheme's library says."""
    source = random_checkpoint(tmp_path / "source", experts=True, block=4)
    path = quantized(source, tmp_path / "quantized", EXPERTS)
    with engine(path, 4, **HALF) as running:
        exact = {name: weight.bfloat16() for name, weight in reference(path).items()}
        layers = experts_of(running)
        assert check_experts(running, exact) == len(layers) == 2
        prompts = [[(7 * i + n) % 290 for i in range(20)] for n in range(4)]
        got = running.generate(prompts, [greedy(24, ignore_eos=True)] * 4)
        assert all(len(tokens) == 24 for tokens, _ in got)
        for layer in layers.values():
            layer.w2_weight.data.zero_()
        running.scheduler.reset_prefix_cache()
        assert running.generate(prompts, [greedy(24, ignore_eos=True)] * 4) != got
