"""What vLLM's layers load of a quantized file, what of it is refused, and names in its config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm_cpu_v2 import quantized_experts

from examples.quantize.files import scheme_named
from tests.support.quantized import TINY
from vllm_dllm.checkpoints.quantized import (
    choose_as_written,
    is_quantized,
    quantized_tensors,
    scheme_of,
)
from vllm_dllm.checkpoints.stored import FLOATS
from vllm_dllm.checkpoints.verify import verified
from vllm_dllm.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
# Methods other than compressed-tensors, and their configurations.
CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "modelopt_fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "gptq": GPTQ,
    "awq": AWQ,
}
# A method, or a scheme of compressed-tensors, to how a matrix [64, 96] is stored.
STORED: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "modelopt": {
        "weight": ("float8_e4m3fn", (64, 96)),
        "weight_scale": ("float32", ()),
        "input_scale": ("float32", ()),
    },
    "modelopt_fp4": {
        "weight": ("uint8", (64, 48)),
        "weight_scale": ("float8_e4m3fn", (64, 6)),
        "weight_scale_2": ("float32", ()),
        "input_scale": ("float32", ()),
    },
    "gptq": {
        "qweight": ("int32", (12, 64)),
        "qzeros": ("int32", (3, 8)),
        "scales": ("float16", (3, 64)),
    },
    "awq": {
        "qweight": ("int32", (96, 8)),
        "qzeros": ("int32", (3, 8)),
        "scales": ("float16", (3, 64)),
    },
    "fp8-dynamic": {
        "weight": ("float8_e4m3fn", (64, 96)),
        "weight_scale": ("bfloat16", (64, 1)),
    },
    "int8": {"weight": ("int8", (64, 96)), "weight_scale": ("float32", (64, 1))},
    "w4a16": {
        "weight_packed": ("int32", (64, 12)),
        "weight_scale": ("bfloat16", (64, 3)),
        "weight_shape": ("int64", (2,)),
    },
    "nvfp4": {
        "weight_packed": ("uint8", (64, 48)),
        "weight_scale": ("float8_e4m3fn", (64, 6)),
        "weight_global_scale": ("float32", (1,)),
        "input_global_scale": ("float32", (1,)),
    },
}
PLAIN = {
    "a.proj.weight": (64, 96),
    "a.experts.gate_up_proj": (2, 128, 96),
    "a.experts.down_proj": (2, 96, 64),
    "norm": (4,),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank, and what a worker on a CPU has."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    quantized_experts.install()
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        yield


@pytest.fixture(scope="module")
def gemma() -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(TINY / "tiny-diffusiongemma")


spellings = DiffusionGemmaForBlockDiffusion.spellings


def groups_of(*groups: tuple[str, list[str]], ignore: Sequence[str] = ()) -> Any:
    """A configuration of compressed-tensors' groups: a scheme's name and its targets."""
    made = {}
    for n, (name, targets) in enumerate(groups):
        scheme = scheme_named(name, 32 if name == "w4a16" else None)
        scheme.targets = targets
        made[f"group_{n}"] = json.loads(scheme.model_dump_json(exclude_none=True))
    config = CompressedTensorsConfig.from_config({"config_groups": made, "ignore": [*ignore]})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def config_of(method: str, **more: Any) -> Any:
    if method not in CONFIGS:
        return groups_of((method, ["Linear"]), **more)
    config = get_quantization_config(method).from_config(CONFIGS[method] | more)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def described(config: Any) -> Any:
    return quantized_tensors(PLAIN, config, lambda name: name.endswith("proj.weight"))


def whole(method: str) -> dict[str, torch.Tensor]:
    """A file with a layer, two experts and a norm."""
    file = {
        name: torch.zeros(one.shape, dtype=min(one.dtypes, key=str))
        for name, one in described(config_of(method)).items()
    }
    for part, (dtype, shape) in STORED[method].items():
        file[f"a.proj.{part}"] = torch.zeros(shape, dtype=getattr(torch, dtype))
    return file


def load(method: str, file: dict[str, torch.Tensor], **more: Any) -> list[str]:
    return [name for name, _ in verified(file.items(), described(config_of(method, **more)), "X")]


@pytest.mark.parametrize("method", STORED)
def test_a_file_as_its_tool_writes_it(method: str) -> None:
    """Each tensor that is missing, or has another dtype or shape, is named.

    Numbers of 16 bits and more stand for each other: vLLM converts them.
    """
    file, parts = whole(method), STORED[method]
    assert set(load(method, file)) == set(file)
    assert {f"a.experts.1.down_proj.{part}" for part in parts} <= set(file)
    assert len(file) == 1 + 7 * len(parts)

    def refused(changed: dict[str, torch.Tensor], name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            load(method, changed)
        assert name in str(caught.value)

    for name, tensor in file.items():
        others = {other: file[other] for other in file if other != name}
        refused(others, name, "lacks 1 of X's tensors")
        refused(others | {name: torch.stack([tensor, tensor])}, name, "has shape")
        same = FLOATS if tensor.dtype in FLOATS else {tensor.dtype}
        for wrong in (torch.int8, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e5m2):
            if wrong not in same and not name.endswith("weight_shape"):
                refused(others | {name: tensor.to(wrong)}, name, "is stored as")


@pytest.mark.parametrize("method", [name for name in STORED if name not in ("gptq", "awq")])
def test_experts_that_were_not_quantized(method: str) -> None:
    """With INT4 and NVFP4 a matrix has another name than one that is not quantized.

    The tools of GPTQ and AWQ quantize experts one by one.
    """
    together = {"a.experts.gate_up_proj": torch.zeros(2, 128, 96, dtype=torch.bfloat16)}
    alone = {"a.experts.0.gate_proj.weight": torch.zeros(64, 96, dtype=torch.bfloat16)}
    for given in (together, alone):
        with pytest.raises(ValueError, match=r"not quantized; leave 'a\.experts' out"):
            load(method, given)
    left = {n: tensor for n, tensor in whole(method).items() if ".experts." not in n}
    left |= together | {"a.experts.down_proj": torch.zeros(2, 96, 64)}
    entry = "a.experts*" if method in CONFIGS else r"re:.*\.experts\..*"
    assert set(load(method, left, ignore=["lm_head", entry])) == set(left)


def test_the_dtype_of_a_refused_tensor_is_named() -> None:
    weight = {"a.proj.weight": torch.zeros(64, 96, dtype=torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"float8_e4m3fn, but by quantization_config as int8"):
        load("int8", weight)
    with pytest.raises(ValueError, match=r"stored as float8.*does not have its layer"):
        load("modelopt", weight, ignore=["a.proj"])
    with pytest.raises(ValueError, match=r"leave 'a\.proj' out"):
        load("int8", {"a.proj.weight": torch.zeros(64, 96)})


def test_groups_in_another_order_are_refused() -> None:
    """GPTQ writes the group of each input; vLLM takes them as they come."""
    file, order = whole("gptq"), (torch.arange(96) // 32).int()
    assert "a.proj.g_idx" not in load("gptq", file | {"a.proj.g_idx": order})
    with pytest.raises(ValueError, match=r"'a\.proj\.g_idx'.*desc_act: false"):
        load("gptq", file | {"a.proj.g_idx": order.flip(0)})


def test_tensors_without_effect_are_passed_over() -> None:
    idle = {
        "a.proj.input_max": torch.ones(1),
        "a.proj.input_scale": torch.ones(1),
        "a.proj.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8),
        "a.proj.input_quantizer._amax": torch.ones(1),
        "a.rotary_emb.inv_freq": torch.ones(4),
    }
    file = whole("int8")
    assert set(load("int8", file | idle)) == set(file)
    for name, tensor, remedy in (
        ("a.proj.weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "symmetric: false"),
        ("a.proj.weight_g_idx", torch.arange(64), "without `actorder`"),
        ("a.proj.pre_quant_scale", torch.ones(64), "folded"),
        ("lm_head.weight_scale", torch.ones(64), "a quantized lm_head is not supported"),
    ):
        with pytest.raises(ValueError, match=remedy):
            load("int8", file | {name: tensor})


def test_patterns_for_checkpoint_names_hold_after_renaming(gemma: Any) -> None:
    ignore = [
        r"re:model\.decoder\.layers\.0\..*",
        r"re:model\.encoder\.vision_tower\..*",
        *(f"model.layers.2.self_attn.{part}_proj" for part in "qk"),
    ]
    config = config_of("fp8-dynamic", ignore=ignore)
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
    config = groups_of(("fp8-dynamic", [r"re:model\.decoder\.layers\.5\..*"]))
    choose_as_written(config, names)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert scheme_of(config, f"model.layers.5.self_attn.{name}") is not None
    assert scheme_of(config, "model.layers.4.self_attn.q_proj") is None


@pytest.mark.parametrize("method", ["modelopt", "awq"])
def test_names_of_the_checkpoint_hold_after_renaming(gemma: Any, method: str) -> None:
    """A wildcard, and a full-attention layer whose values are its keys."""
    keys = [f"model.layers.2.self_attn.{part}_proj" for part in "qk"]
    wild = "decoder.layers.0" if method == "awq" else "*.decoder.layers.0.*"
    key = "modules_to_not_convert" if method == "awq" else "ignore"
    config = config_of(method, **{key: [wild, *keys]})
    choose_as_written(config, spellings(gemma))
    assert not is_quantized(config, "model.layers.0.mlp.gate_proj")
    assert not is_quantized(config, "model.layers.0.experts.0.up_proj")
    assert is_quantized(config, "model.layers.1.mlp.gate_proj")
    assert not is_quantized(config, "model.layers.2.self_attn.v_proj")
    assert is_quantized(config, "model.layers.2.self_attn.o_proj")


def test_a_scale_of_a_whole_layer_leaves_nothing_out(gemma: Any) -> None:
    """vLLM lists the owners of all tensors that are not quantized where a file has no list."""
    config = config_of("awq")
    config.modules_to_not_convert += ["model.layers.0", "model.layers.1.self_attn.o_proj"]
    choose_as_written(config, spellings(gemma))
    assert is_quantized(config, "model.layers.0.self_attn.o_proj")
    assert not is_quantized(config, "model.layers.1.self_attn.o_proj")


QKV = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
NAMES: dict[str, list[str]] = {name: [name] for name in [*QKV, "model.layers.1.mlp.down_proj"]}


def kinds(config: Any, *names: str) -> list[str]:
    types = [scheme_of(config, name)["weights"].type for name in names]
    return [next(kind for kind in ("int", "float") if kind == found) for found in types]


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
    both = [("fp8-dynamic", [fp8]), ("int8", [int8])]
    for groups in (both, both[::-1]):
        config = groups_of(*groups)
        choose_as_written(config, NAMES)
        assert kinds(config, name) == [chosen]
        library = match_targets(name, torch.nn.Linear(1, 1), [fp8, int8])[0]
        assert library == (fp8 if chosen == "float" else int8)


def test_a_fused_layer_has_the_scheme_of_its_parts() -> None:
    """The first pattern matches `qkv_proj` and the second does not."""
    config = groups_of(("fp8-dynamic", [r"re:.*layers\.1\..*"]), ("int8", [r"re:.*\.[qkv]_proj$"]))
    assert kinds(config, QKV[0].replace("q_proj", "qkv_proj")) == ["float"], "vLLM alone"
    choose_as_written(config, NAMES)
    assert kinds(config, *QKV, QKV[0].replace("q_proj", "qkv_proj")) == ["int"] * 4


def test_parts_of_a_layer_with_different_schemes_are_refused() -> None:
    config = groups_of(("fp8-dynamic", ["Linear"]), ("int8", [r"re:.*k_proj$"]))
    with pytest.raises(ValueError, match=r"q_proj and .*k_proj are one layer .*different schemes"):
        choose_as_written(config, NAMES)
    experts = [f"model.layers.1.mlp.experts.{n}.down_proj" for n in range(3)]
    config = groups_of(("fp8-dynamic", ["Linear"]), ignore=[experts[2]])
    with pytest.raises(ValueError, match=r"experts\.2\.down_proj are one layer"):
        choose_as_written(config, {name: [name] for name in experts})


def test_every_layer_that_can_be_quantized_has_a_spelling(gemma: Any) -> None:
    modules = set(spellings(gemma))
    assert not any("router" in name or "self_conditioning" in name for name in modules)
    shapes = DiffusionGemmaForBlockDiffusion.tensor_shapes(gemma)
    matrices = {n for n, s in shapes.items() if len(s) == 2 and "_proj" in n}
    left = {n for n in matrices if n.removesuffix(".weight") not in modules}
    assert all("router" in n or "self_conditioning" in n or "vision" in n for n in left), left
