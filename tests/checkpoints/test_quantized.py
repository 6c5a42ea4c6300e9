"""Names in `quantization_config`, and what a scheme stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from examples.quantize.files import scheme_named
from vllm_dllm.checkpoints.quantized import (
    choose_as_written,
    in_words,
    quantized_tensors,
    scheme_of,
    stored_as,
    word_of,
)
from vllm_dllm.checkpoints.verify import verified
from vllm_dllm.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

spellings = DiffusionGemmaForBlockDiffusion.spellings


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

    from tests.support.quantized import TINY

    return AutoConfig.from_pretrained(TINY / "tiny-diffusiongemma")


def test_patterns_for_checkpoint_names_hold_after_renaming(gemma: Any) -> None:
    ignore = [
        r"re:model\.decoder\.layers\.0\..*",
        r"re:model\.encoder\.vision_tower\..*",
        "model.layers.2.self_attn.k_proj",
    ]
    config = config_of(ignore)
    names = spellings(gemma)
    choose_as_written(config, names)
    assert scheme_of(config, "model.layers.0.mlp.gate_proj") is None
    assert scheme_of(config, "model.layers.0.experts.3.down_proj") is None
    assert scheme_of(config, "model.layers.1.mlp.gate_proj") is not None
    vision = [name for name in names if name.startswith("vision_tower.")]
    assert vision
    assert all(scheme_of(config, name) is None for name in vision)
    assert scheme_of(config, "model.layers.2.self_attn.v_proj") is None, "it is the keys'"
    once = list(config.ignore)
    choose_as_written(config, names)
    assert config.ignore == once


def groups_of(*groups: tuple[str, list[str]], ignore: Sequence[str] = ()) -> Any:
    """A configuration of groups: a scheme's name and its targets."""
    made = {}
    for n, (name, targets) in enumerate(groups):
        scheme = scheme_named(name)
        scheme.targets = targets
        made[f"group_{n}"] = json.loads(scheme.model_dump_json(exclude_none=True))
    config = CompressedTensorsConfig.from_config({"config_groups": made, "ignore": [*ignore]})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def kinds(config: Any, *names: str) -> list[str]:
    return [word_of(scheme_of(config, name)["weights"].type) for name in names]


QKV = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
NAMES: dict[str, list[str]] = {name: [name] for name in [*QKV, "model.layers.1.mlp.down_proj"]}


@pytest.mark.parametrize(
    ("fp8", "int8", "chosen"),
    [
        # Patterns by their letters, not as they stand in the file.
        (r"re:.*layers\.1\..*", r"re:.*down_proj", "int"),
        (r"re:.*[d]own_proj", r"re:.*down_proj", "float"),
        # Names before patterns, and patterns before classes.
        (r"re:.*down_proj", "model.layers.1.mlp.down_proj", "int"),
        ("Linear", r"re:.*down_proj", "int"),
        (r"re:.*down_proj", "Linear", "float"),
    ],
)
def test_the_library_and_vllm_choose_the_same_target(fp8: str, int8: str, chosen: str) -> None:
    from compressed_tensors.utils.match import match_targets

    name = "model.layers.1.mlp.down_proj"
    for both in ([("fp8-dynamic", [fp8]), ("int8", [int8])],) * 2:
        config = groups_of(*both)
        choose_as_written(config, NAMES)
        assert kinds(config, name) == [chosen]
        library = match_targets(name, torch.nn.Linear(1, 1), [fp8, int8])[0]
        assert library == (fp8 if chosen == "float" else int8)
        both.reverse()


def test_a_fused_layer_has_the_scheme_of_its_parts() -> None:
    """The first pattern matches `qkv_proj` and the second does not."""
    config = groups_of(("fp8-dynamic", [r"re:.*layers\.1\..*"]), ("int8", [r"re:.*\.[qkv]_proj$"]))
    assert kinds(config, QKV[0].replace("q_proj", "qkv_proj")) == ["float"], "vLLM alone"
    choose_as_written(config, NAMES)
    assert kinds(config, *QKV, QKV[0].replace("q_proj", "qkv_proj")) == ["int"] * 4


def test_parts_of_a_layer_with_different_schemes_are_refused() -> None:
    config = groups_of(("fp8-dynamic", ["Linear"]), ("int8", [r"re:.*k_proj$"]))
    with pytest.raises(ValueError, match=r"q_proj and .*k_proj are one layer .*group_0.*group_1"):
        choose_as_written(config, NAMES)
    experts = [f"model.layers.1.mlp.experts.{n}.down_proj" for n in range(3)]
    config = groups_of(("fp8-dynamic", ["Linear"]), ignore=[experts[2]])
    with pytest.raises(ValueError, match=r"experts\.2\.down_proj are one layer.*no group"):
        choose_as_written(config, {name: [name] for name in experts})


def loaded(config: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    plain = {"a.proj.weight": (64, 64), "a.experts.0.gate_proj.weight": (64, 64), "norm": (4,)}
    described = quantized_tensors(plain, config, lambda name: name.endswith("proj.weight"))
    assert described is not None
    return [name for name, _ in verified(tensors.items(), described, "X", whole=False)]


SCHEMES = {
    "fp8-dynamic": {"weight": "float8_e4m3fn", "weight_scale": "float32"},
    "int8": {"weight": "int8", "weight_scale": "float32"},
    "w4a16": {"weight_packed": "int32", "weight_scale": "float32", "weight_shape": "int64"},
    "nvfp4": {
        "weight_packed": "uint8",
        "weight_scale": "float8_e4m3fn",
        "weight_global_scale": "float32",
        "input_global_scale": "float32",
    },
}
DTYPES = ("float8_e4m3fn", "int8", "uint8", "int32", "int64", "float32", "bfloat16", "float16")
FLOATING = {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize("name", list(SCHEMES))
def test_every_tensor_has_its_dtype(name: str) -> None:
    config = groups_of((name, ["Linear"]))
    shapes = stored_as((64, 64), scheme_of(config, "a.proj"))
    assert set(shapes) == set(SCHEMES[name])
    for part, right in SCHEMES[name].items():
        for dtype in DTYPES:
            tensor = torch.zeros(shapes[part].shape, dtype=getattr(torch, dtype))
            given = {f"a.proj.{part}": tensor}
            same = FLOATING if right in FLOATING else {right}
            if dtype in same or (part, dtype) == ("weight_shape", "int32"):
                assert loaded(config, given) == list(given)
                continue
            says = "add 'a.proj' to `ignore`" if part == "weight" and dtype in FLOATING else right
            with pytest.raises(ValueError, match=rf"'a\.proj\.{part}' is stored as {dtype}") as e:
                loaded(config, given)
            assert "group 'group_0' of quantization_config (" in str(e.value)
            assert says in str(e.value), str(e.value)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_experts_that_were_not_quantized(name: str) -> None:
    """With INT4 and NVFP4 a matrix has another name than one that is not quantized."""
    given = {"a.experts.0.gate_proj.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="stored as bfloat16 and not quantized") as caught:
        loaded(groups_of((name, ["Linear"])), given)
    assert r"add 're:.*\\.experts\\..*' to `ignore`" in str(caught.value)
    without = groups_of((name, ["Linear"]), ignore=[r"re:.*\.experts\..*"])
    assert loaded(without, given) == list(given)
    together = {"a.experts.gate_up_proj": torch.zeros(2, 128, 64, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="add 're:"):
        loaded(groups_of((name, ["Linear"])), together)


def test_a_quantized_tensor_without_a_group() -> None:
    given = {"a.proj.weight": torch.zeros(64, 64, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"stored as int8, and no group .* add the layer to"):
        loaded(groups_of(("int8", ["Linear"]), ignore=["a.proj"]), given)


def test_tensors_without_effect_are_passed_over() -> None:
    config = groups_of(("int8", ["Linear"]))
    idle = {
        "a.proj.input_max": torch.ones(1),
        "a.proj.input_scale": torch.ones(1),
        "a.proj.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8),
        "a.proj.input_quantizer._amax": torch.ones(1),
        "a.rotary_emb.inv_freq": torch.ones(4),
    }
    assert loaded(config, idle | {"norm": torch.ones(4)}) == ["norm"]
    for name, tensor, remedy in (
        ("a.proj.weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "symmetric: false"),
        ("a.proj.weight_g_idx", torch.arange(64), "without `actorder`"),
        ("a.proj.pre_quant_scale", torch.ones(64), "folded"),
    ):
        with pytest.raises(ValueError, match=remedy):
            loaded(config, {name: tensor})


def test_targets_for_checkpoint_names_hold_after_renaming(gemma: Any) -> None:
    config = config_of([], [r"re:model\.decoder\.layers\.5\..*"])
    choose_as_written(config, spellings(gemma))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert scheme_of(config, f"model.layers.5.self_attn.{name}") is not None
    assert scheme_of(config, "model.layers.4.self_attn.q_proj") is None


def test_every_layer_that_can_be_quantized_has_a_spelling(gemma: Any) -> None:
    modules = set(spellings(gemma))
    assert not any("router" in name or "self_conditioning" in name for name in modules)
    shapes = DiffusionGemmaForBlockDiffusion.tensor_shapes(gemma)
    matrices = {n for n, s in shapes.items() if len(s) == 2 and "_proj" in n}
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
