"""Names in `quantization_config`, and what a scheme stores."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from examples.quantize.files import scheme_named
from vllm_dllm.checkpoints.quantized import (
    in_words,
    naming_the_scheme,
    scheme_of,
    spell_out,
    stored_as,
)
from vllm_dllm.families.diffusion_gemma.model import spellings, tensor_shapes


def config_of(ignore: list[str], targets: list[str] | None = None) -> CompressedTensorsConfig:
    group = {
        "targets": targets or ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    return CompressedTensorsConfig.from_config(
        {"config_groups": {"group_0": group}, "ignore": ignore, "format": "float-quantized"}
    )


@pytest.fixture(scope="module")
def gemma() -> Any:
    from transformers import AutoConfig

    from tests.engine.quantized import TINY

    return AutoConfig.from_pretrained(TINY / "tiny-diffusiongemma")


def test_patterns_for_checkpoint_names_hold_after_renaming(gemma: Any) -> None:
    ignore = [
        r"re:model\.decoder\.layers\.0\..*",
        r"re:model\.encoder\.vision_tower\..*",
        "model.layers.2.self_attn.k_proj",
    ]
    config = config_of(ignore)
    names = spellings(gemma)
    spell_out(config, names)
    assert scheme_of(config, "model.layers.0.mlp.gate_proj") is None
    assert scheme_of(config, "model.layers.0.experts.3.down_proj") is None
    assert scheme_of(config, "model.layers.1.mlp.gate_proj") is not None
    vision = [name for name in names if name.startswith("vision_tower.")]
    assert vision
    assert all(scheme_of(config, name) is None for name in vision)
    assert scheme_of(config, "model.layers.2.self_attn.v_proj") is None, "it is the keys'"
    once = list(config.ignore)
    spell_out(config, names)
    assert config.ignore == once


def test_targets_for_checkpoint_names_hold_after_renaming(gemma: Any) -> None:
    config = config_of([], [r"re:model\.decoder\.layers\.5\..*"])
    spell_out(config, spellings(gemma))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert scheme_of(config, f"model.layers.5.self_attn.{name}") is not None
    assert scheme_of(config, "model.layers.4.self_attn.q_proj") is None


def test_every_layer_that_can_be_quantized_has_a_spelling(gemma: Any) -> None:
    modules = set(spellings(gemma))
    assert not any("router" in name or "self_conditioning" in name for name in modules)
    matrices = {n for n, s in tensor_shapes(gemma).items() if len(s) == 2 and "_proj" in n}
    left = {n for n in matrices if n.removesuffix(".weight") not in modules}
    assert all("router" in n or "self_conditioning" in n or "vision" in n for n in left), left


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8-dynamic", "FP8 weights by channel, dynamic FP8 activations by token"),
        ("int8", "INT8 weights by channel, dynamic INT8 activations by token"),
        ("w4a16", "INT4 weights by group of 128, activations as they are"),
        ("nvfp4", "NVFP4 weights by group of 16, dynamic NVFP4 activations by group of 16"),
    ],
)
def test_schemes_in_words(name: str, words: str) -> None:
    scheme = scheme_named(name)
    assert in_words(scheme.weights, scheme.input_activations) == words


def test_an_unknown_layout_is_none() -> None:
    scheme = scheme_named("int8")
    arguments = {"weights": scheme.weights, "input_activations": None, "format": "zip"}
    assert stored_as((4, 8), arguments) is None


def test_an_error_while_layers_are_built_names_scheme_and_platform() -> None:
    with (
        pytest.raises(ValueError, match=r"FP8 weights by channel.* on cpu .*: no kernel"),
        naming_the_scheme(config_of([])),
    ):
        raise NotImplementedError("no kernel")
    with pytest.raises(NotImplementedError), naming_the_scheme(None):
        raise NotImplementedError("not about quantization")
