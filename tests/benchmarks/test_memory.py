"""The memory of published models, and the floor of a step, are computed from what is published."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks import model_memory, real_size
from benchmarks.published import (
    DIFFUSION_GEMMA,
    LLADA2_FLASH,
    LLADA2_MINI,
    SHAPES,
    Attention,
    Geometry,
)
from tests.benchmarks.geometries import geometry
from tests.support.published import (
    gemma_config,
    gemma_tensors,
    llada2_config,
    llada2_tensors,
    sdar_config,
    sdar_tensors,
)
from vllm_dllm.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion
from vllm_dllm.families.llada2.family import LLaDA2MoeConfig
from vllm_dllm.families.llada2.model import LLaDA2MoeModelLM

BF16 = model_memory.unquantized()
PUBLISHED = {
    "LLaDA2.x-mini": (llada2_config, llada2_tensors, ("llada2-mini",)),
    "LLaDA2.x-flash": (llada2_config, llada2_tensors, ("llada2-flash",)),
    "SDAR-1.7B": (sdar_config, sdar_tensors, ("sdar-1.7b-chat",)),
    "SDAR-30B-A3B": (sdar_config, sdar_tensors, ("sdar-30b-a3b-chat",)),
    "DiffusionGemma-26B-A4B": (lambda: gemma_config().to_dict(), gemma_tensors, ()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_geometry_is_that_of_its_configuration(name: str) -> None:
    config, tensors, checkpoint = PUBLISHED[name]
    model = SHAPES[name]
    assert replace(geometry(config(*checkpoint)), vision=model.vision) == model
    counted = sum(math.prod(shape) for shape in tensors(*checkpoint).values())
    # Encoder and decoder have a scalar each for every layer.
    scalars = 2 * model.layers if model.is_uniform else 0
    assert model_memory.parameters(model)[0] == counted - scalars


def test_the_bytes_of_published_indexes() -> None:
    """Total sizes that LLaDA2.0's indexes state, and the one file of SDAR-1.7B-Chat."""
    for model, size in ((LLADA2_MINI, 32_511_286_784), (LLADA2_FLASH, 205_779_410_432)):
        assert 2 * model_memory.parameters(model)[0] == size
    assert round(2 * model_memory.parameters(SHAPES["SDAR-1.7B"])[0] / 1e9, 2) == 4.06


def test_a_layer_by_hand() -> None:
    """A model of one layer with two experts, on one device and on two."""
    one = Attention(layers=1, heads=4, kv_heads=1, dim=4)
    model = Geometry(2, 8, 64, (one,), {6: 1}, experts=2, chosen=1, width=10, moe_layers=1)
    attention = (4 + 2) * 4 * 8 + 8 * 4 * 4
    mlp, expert = 3 * 6 * 8, 3 * 10 * 8
    replicated = 2 * 8 + 8 + 2 * 4 + 2 * 8  # norms of the layer, the last, of heads; the router
    whole = attention + mlp + 2 * expert + 2 * 64 * 8 + replicated
    assert model_memory.parameter_bytes(model, BF16) == 2 * whole
    # The head of keys and that of values are on both.
    half = (2 + 2) * 4 * 8 + 8 * 2 * 4 + (mlp + 2 * expert) // 2 + 64 * 8 + replicated
    assert model_memory.parameter_bytes(model, BF16, 2) == 2 * half
    assert model_memory.token_bytes(model, 1) == model_memory.token_bytes(model, 2) == 2 * 2 * 4
    with pytest.raises(model_memory.UnevenError, match="6 channels of an MLP over 4 devices"):
        model_memory.parameter_bytes(model, BF16, 4)
    with pytest.raises(model_memory.UnevenError, match="8 inputs are not whole groups of 5"):
        model_memory.parameter_bytes(model, model_memory.int4(5))


def test_pages_of_layers_that_differ() -> None:
    """DiffusionGemma: five groups of sliding layers and one of full ones share a pool."""
    layout = model_memory.cache(DIFFUSION_GEMMA, 1, 16)
    assert layout.groups == ((16, 1024),) * 5 + ((32, None),)
    assert layout.page_bytes == 5 * 2 * 16 * 8 * 256 * 2
    assert layout.blocks(262144, 32768) == 5 * (math.ceil((1023 + 32768) / 16) + 1) + 262144 // 32
    # With eight devices a sliding layer has one head of 256, a full one still has one of 512.
    assert model_memory.cache(DIFFUSION_GEMMA, 8, 16).groups == ((32, 1024),) * 5 + ((16, None),)


def test_tables_are_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_memory.main(["--check"]) == 0, capsys.readouterr().err


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
