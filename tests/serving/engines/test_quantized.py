"""Quantized checkpoints of both families, through vLLM's own layers and a real engine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from examples.quantize.files import matches
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine, greedy
from tests.support.quantized import CALIBRATED, FAMILIES, MIXED, TINY, quantized

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
# INT4 has no kernel for float32.
HALF = {**TEXT_ONLY_OPTIONS, "dtype": "bfloat16"}
PER_TASK = 6


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def mixed(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8, INT8, INT4 and NVFP4 in one checkpoint, a layer each."""
    return quantized(tmp_path_factory.mktemp(family), family, MIXED)


def encoded(family: str) -> list[Example]:
    tokenizer = llada2_tokenizer() if family == "llada2" else gemma_processor().tokenizer
    return [Encoder(tokenizer)(problem) for problem in held_out_set(PER_TASK)]


def solved(running: Engine, examples: list[Example]) -> int:
    params = [greedy(64) for _ in examples]
    got = running.generate([example.prompt for example in examples], params)
    return sum(tokens == example.answer for (tokens, _), example in zip(got, examples, strict=True))


def reference(path: Path) -> dict[str, torch.Tensor]:
    """Module to its matrix in float32, by the scheme's own library."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig(**config).config_groups.values()
    schemes = {target: group for group in groups for target in group.targets}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        parts.setdefault(module, {})[part] = tensor
    found = {}
    for module, state in parts.items():
        if "weight_scale" not in state:
            continue
        scheme = next(schemes[target] for target in sorted(schemes) if matches(target, module))
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        if scheme.format == "pack-quantized":
            # vLLM's layers hold the scales of INT4 in the model's dtype.
            state["weight_scale"] = state["weight_scale"].bfloat16()
        if scheme.format != "nvfp4-pack-quantized":
            state["weight_scale"] = state["weight_scale"].float()
        found[module] = compressor.decompress(state, scheme)["weight"].float()
    return found


def experts_of(running: Engine) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    model = running.runner.model
    return {
        name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)
    }


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of a weight. Rows of the identity are rounded as activations are: exactly to FP8 and INT8 with a
# scale of their own; to NVFP4 with a group's scale, which is a number of four bits itself.
ROUNDING = {1: 2.0**-7, 2: 2.0**-7, 3: 2.0**-7, 4: 2.0**-3}


def linear_layers(
    running: Engine, exact: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """(name, layer, what its matrix should be) of the quantized linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    for name, layer in running.runner.model.named_modules():
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}.{part}" for part in FUSED.get(last, (last,))]
        if isinstance(layer, LinearBase) and parts[0] in exact:
            # A full-attention layer of DiffusionGemma takes its keys for values.
            parts = [part if part in exact else part.replace("v_proj", "k_proj") for part in parts]
            yield name, layer, torch.cat([exact[part] for part in parts])


def check_linear_layers(
    running: Engine, exact: dict[str, torch.Tensor], layers: set[int] | None = None
) -> None:
    """The product with the identity is the reference's matrix, up to rounding."""
    seen = set()
    for name, layer, matrix in linear_layers(running, exact):
        number = int(re.search(r"layers\.(\d)", name)[1])
        product, _ = layer(torch.eye(matrix.shape[1], dtype=torch.bfloat16))
        limit = ROUNDING[number] * matrix.float().abs() + 1e-6
        assert ((product.T.float() - matrix.float()).abs() <= limit).all(), name
        seen.add(number)
    assert seen == (layers or set(ROUNDING))


def check_experts(running: Engine, exact: dict[str, torch.Tensor]) -> int:
    """Experts that are dequantized are the reference's to the bit; how many layers have some.

    For processors with AMX vLLM has a kernel of its own, which keeps the experts as integers.
    """
    compared = 0
    for name, layer in experts_of(running).items():
        prefix = name.removesuffix(".routed_experts")
        if f"{prefix}.0.gate_proj" not in exact:
            continue
        compared += 1
        if layer.w13_weight.dtype != torch.bfloat16:
            assert torch.cpu._is_amx_tile_supported(), "nothing else has a kernel for them"
            continue
        for expert in range(layer.w13_weight.shape[0]):
            gate, up, down = (
                exact[f"{prefix}.{expert}.{part}_proj"].float().bfloat16()
                for part in ("gate", "up", "down")
            )
            assert torch.equal(layer.w13_weight[expert], torch.cat([gate, up])), name
            assert torch.equal(layer.w2_weight[expert], down), name
    return compared


def test_all_schemes_in_one_checkpoint(family: str, mixed: Path) -> None:
    """A scheme a layer: answers stay right, and experts are what the library says, to the bit."""
    examples = encoded(family)
    with engine(TINY / FAMILIES[family], BLOCK, **HALF) as running:
        before = solved(running, examples)
    with engine(mixed, BLOCK, **HALF) as running:
        after = solved(running, examples)
        exact = {
            module.replace("decoder.", ""): weight.bfloat16()
            for module, weight in reference(mixed).items()
        }
        check_linear_layers(running, exact)
        assert check_experts(running, exact) == len(MIXED)
    assert after >= 0.9 * before, (after, before)
    assert before >= 0.75 * len(examples)


@pytest.mark.parametrize(
    ("family", "eager"),
    [
        ("llada2", True),
        pytest.param("llada2", False, marks=pytest.mark.long),
        ("gemma", True),
        pytest.param("gemma", False, marks=pytest.mark.long),
    ],
    indirect=["family"],
)
def test_calibrated_nvfp4(family: str, eager: bool) -> None:
    """Compiled too, as a server is unless told not to: experts branch on what a router chose."""
    examples = encoded(family)
    options = {**TEXT_ONLY_OPTIONS, "enforce_eager": eager}
    with engine(CALIBRATED / f"{FAMILIES[family]}-nvfp4", BLOCK, **options) as running:
        assert solved(running, examples) >= 0.6 * len(examples)


def test_fp8_of_an_unquantized_checkpoint(family: str) -> None:
    examples = encoded(family)[:14]
    options = {**HALF, "quantization": "fp8"}
    with engine(TINY / FAMILIES[family], BLOCK, **options) as running:
        assert solved(running, examples) >= 0.6 * len(examples)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"strategy": "block", "block_structure": [32, 32]}, "Failed to find a kernel"),
        ({"num_bits": 4, "type": "int"}, "No compressed-tensors compatible scheme"),
    ],
)
def test_vllm_refuses_a_scheme_without_kernels(
    mixed: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / mixed.name
    path.mkdir()
    for file in mixed.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match=complaint), engine(path, BLOCK, **HALF):
        pass


def test_a_group_of_another_type_is_refused(mixed: Path, tmp_path: Path) -> None:
    """It would start, and answer with numbers that are made of other numbers' bits."""
    path = Path(shutil.copytree(mixed, tmp_path / mixed.name))
    config = json.loads((path / "config.json").read_text())
    fp8, int8, *_ = config["quantization_config"]["config_groups"].values()
    fp8["targets"], int8["targets"] = int8["targets"], fp8["targets"]
    (path / "config.json").write_text(json.dumps(config))
    message = r"is stored as (int8|float8_e4m3fn), but group 'group_[01]' of quantization_config"
    with pytest.raises((ValueError, RuntimeError), match=message), engine(path, BLOCK, **HALF):
        pass


def test_a_missing_scale_is_named(mixed: Path, tmp_path: Path) -> None:
    part = "experts.3.up_proj.weight_scale"
    path = Path(shutil.copytree(mixed, tmp_path / mixed.name))
    tensors = load_file(path / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith(part))]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises((ValueError, RuntimeError), match=re.escape(part)),
        engine(path, BLOCK, **HALF),
    ):
        pass
