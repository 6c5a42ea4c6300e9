"""What vLLM's layers load for ModelOpt, GPTQ and AWQ, and what is refused about a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm_cpu_v2 import quantized_experts

from vllm_dllm.checkpoints.quantized import choose_as_written, quantized_tensors
from vllm_dllm.checkpoints.verify import FLOATS, verified
from vllm_dllm.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
# Method to its configuration, and how a matrix [64, 96] is stored: dtype and shape by name.
METHODS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        {
            "weight": ("float8_e4m3fn", (64, 96)),
            "weight_scale": ("float32", ()),
            "input_scale": ("float32", ()),
        },
    ),
    "modelopt_fp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {
            "weight": ("uint8", (64, 48)),
            "weight_scale": ("float8_e4m3fn", (64, 6)),
            "weight_scale_2": ("float32", ()),
            "input_scale": ("float32", ()),
        },
    ),
    "gptq": (
        GPTQ,
        {
            "qweight": ("int32", (12, 64)),
            "qzeros": ("int32", (3, 8)),
            "scales": ("float16", (3, 64)),
        },
    ),
    "awq": (
        AWQ,
        {
            "qweight": ("int32", (96, 8)),
            "qzeros": ("int32", (3, 8)),
            "scales": ("float16", (3, 64)),
        },
    ),
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
    with set_current_vllm_config(VllmConfig()):
        yield


def config_of(method: str, **more: Any) -> Any:
    config = get_quantization_config(method).from_config(METHODS[method][0] | more)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def described(config: Any) -> Any:
    return quantized_tensors(PLAIN, config, lambda name: name.endswith("proj.weight"))


def whole(method: str) -> dict[str, torch.Tensor]:
    """A file with a layer, two experts and a norm."""
    config = config_of(method)
    file = {
        name: torch.zeros(one.shape, dtype=min(one.dtypes, key=str))
        for name, one in described(config).items()
    }
    for part, (dtype, shape) in METHODS[method][1].items():
        file[f"a.proj.{part}"] = torch.zeros(shape, dtype=getattr(torch, dtype))
    return file


def load(method: str, file: dict[str, torch.Tensor], **more: Any) -> list[str]:
    return [name for name, _ in verified(file.items(), described(config_of(method, **more)), "X")]


@pytest.mark.parametrize("method", list(METHODS))
def test_a_file_as_its_tool_writes_it(method: str) -> None:
    file, parts = whole(method), METHODS[method][1]
    assert set(load(method, file)) == set(file)
    assert {f"a.experts.1.down_proj.{part}" for part in parts} <= set(file)
    assert len(file) == 1 + 7 * len(parts)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_tensor_that_is_missing_is_named(method: str) -> None:
    file = whole(method)
    for name in file:
        with pytest.raises(ValueError, match="lacks 1 of X's tensors") as caught:
            load(method, {other: tensor for other, tensor in file.items() if other != name})
        assert name in str(caught.value)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("wrong", ["int8", "uint8", "int64", "bfloat16", "float8_e5m2"])
def test_every_dtype_that_is_wrong_is_named(method: str, wrong: str) -> None:
    """Numbers of 16 bits and more stand for each other: vLLM converts them."""
    file = whole(method)
    for name, tensor in file.items():
        changed = tensor.to(getattr(torch, wrong))
        same = FLOATS if tensor.dtype in FLOATS else {tensor.dtype}
        if changed.dtype in same:
            continue
        with pytest.raises(ValueError, match="is stored as") as caught:
            load(method, file | {name: changed})
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_shape_that_is_wrong_is_named(method: str) -> None:
    file = whole(method)
    for name, tensor in file.items():
        with pytest.raises(ValueError, match="has shape") as caught:
            load(method, file | {name: torch.stack([tensor, tensor])})
        assert repr(name) in str(caught.value)


def test_groups_in_another_order_are_refused() -> None:
    """GPTQ writes the group of each input; vLLM takes them as they come."""
    file, order = whole("gptq"), (torch.arange(96) // 32).int()
    assert "a.proj.g_idx" not in load("gptq", file | {"a.proj.g_idx": order})
    with pytest.raises(ValueError, match=r"'a\.proj\.g_idx'.*desc_act: false"):
        load("gptq", file | {"a.proj.g_idx": order.flip(0)})


def test_a_scale_before_the_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pre_quant_scale.*folded into the layer before"):
        load("modelopt_fp4", whole("modelopt_fp4") | {"a.proj.pre_quant_scale": torch.ones(96)})


def test_experts_that_were_not_quantized() -> None:
    together = {"a.experts.gate_up_proj": torch.zeros(2, 128, 96, dtype=torch.bfloat16)}
    with pytest.raises(
        ValueError, match=r"not quantized, but quantization_config \(ModelOpt NVFP4\)"
    ):
        load("modelopt_fp4", together)
    file = {
        name: tensor for name, tensor in whole("modelopt_fp4").items() if ".experts." not in name
    }
    file |= together | {"a.experts.down_proj": torch.zeros(2, 96, 64)}
    assert set(load("modelopt_fp4", file, ignore=["lm_head", "a.experts*"])) == set(file)


def test_a_layer_that_was_left_out_but_is_quantized() -> None:
    with pytest.raises(ValueError, match=r"'a\.proj\.weight' is stored as float8.*left out"):
        load("modelopt", whole("modelopt"), ignore=["a.proj"])


@pytest.fixture(scope="module")
def gemma() -> Any:
    from transformers import AutoConfig

    from tests.support.quantized import TINY

    return AutoConfig.from_pretrained(TINY / "tiny-diffusiongemma")


def is_quantized(config: Any, module: str) -> bool:
    shape = {f"{module}.weight": (64, 64)}
    found = quantized_tensors(shape, config, lambda name: True)
    assert found is not None
    return f"{module}.weight" not in found or found[f"{module}.weight"].group != ""


@pytest.mark.parametrize("method", ["modelopt", "awq"])
def test_names_of_the_checkpoint_hold_after_renaming(gemma: Any, method: str) -> None:
    """A wildcard, and a full-attention layer whose values are its keys."""
    keys = [f"model.layers.2.self_attn.{part}_proj" for part in "qk"]
    wild = "decoder.layers.0" if method == "awq" else "*.decoder.layers.0.*"
    key = "modules_to_not_convert" if method == "awq" else "ignore"
    config = config_of(method, **{key: [wild, *keys]})
    choose_as_written(config, DiffusionGemmaForBlockDiffusion.spellings(gemma))
    assert not is_quantized(config, "model.layers.0.mlp.gate_proj")
    assert not is_quantized(config, "model.layers.0.experts.0.up_proj")
    assert is_quantized(config, "model.layers.1.mlp.gate_proj")
    assert not is_quantized(config, "model.layers.2.self_attn.v_proj")
    assert is_quantized(config, "model.layers.2.self_attn.o_proj")


def test_a_scale_of_a_whole_layer_leaves_nothing_out(gemma: Any) -> None:
    """vLLM lists the owners of all tensors that are not quantized where a file has no list."""
    config = config_of("awq")
    config.modules_to_not_convert += ["model.layers.0", "model.layers.1.self_attn.o_proj"]
    choose_as_written(config, DiffusionGemmaForBlockDiffusion.spellings(gemma))
    assert is_quantized(config, "model.layers.0.self_attn.o_proj")
    assert not is_quantized(config, "model.layers.1.self_attn.o_proj")
