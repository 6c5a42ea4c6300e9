"""Quantized checkpoints as several tools package them, through vLLM's layers and real engines."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from examples.quantize.files import matches, quantize_checkpoint, scheme_named
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder, Example
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.long import long_but
from tests.support.quantized import (
    CALIBRATED,
    FAMILIES,
    GROUP,
    MIXED,
    TINY,
    input_scales,
    quantized,
)
from tests.support.reference_dream import random_checkpoint as random_dream
from tests.support.reference_fast_dllm import random_checkpoint as random_fast_dllm
from tests.support.reference_nemotron import random_checkpoint as random_nemotron
from tests.support.reference_openpangu import random_checkpoint as random_openpangu
from tests.support.reference_sdar import random_checkpoint as random_sdar
from tests.support.reference_vision import nemotron_checkpoint, sdar_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Name of a case: a scheme and a packaging of `examples.quantize`.
CASES = {
    "modelopt-fp8": ("fp8", "modelopt"),
    "modelopt-nvfp4": ("nvfp4", "modelopt"),
    "modelopt-nvfp4-own-file": ("nvfp4", "modelopt-in-own-file"),
    "gptq": ("w4a16", "gptq"),
    "awq": ("w4a16-asymmetric", "awq"),
    "w8a16": ("w8a16", "compressed-tensors"),
    "w4a16": ("w4a16", "compressed-tensors"),
    "w4a16-asymmetric": ("w4a16-asymmetric", "compressed-tensors"),
    "w4a16-rows": ("w4a16", "compressed-tensors"),
    "gptq-rows": ("w4a16", "gptq"),
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packaged(folder: Path, family: str, case: str, source: Path | None = None) -> Path:
    """A family's tiny checkpoint in a packaging, or a `source` that was never calibrated."""
    scheme, packaging = CASES[case]
    known = None
    if packaging.startswith("modelopt"):
        known = input_scales(family) if source is None else some_scales(source)
    out = folder / f"{family}-{case}"
    size = -1 if case.endswith("rows") else GROUP
    schemes = [scheme_named(scheme, size if "a16" in scheme else None)]
    quantize_checkpoint(source or TINY / FAMILIES[family], out, schemes, known, packaging)
    return out


def some_scales(source: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """One scale for the inputs of all layers: the largest is 27."""
    names = load_file(source / "model.safetensors")
    return {
        name.removesuffix(".weight"): {"input_global_scale": torch.tensor([100.0])}
        for name in names
    }


def layers_in(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each quantized layer, by its name in the checkpoint."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        layers.setdefault(module, {})[part] = tensor
    return {
        name: parts for name, parts in layers.items() if parts.keys() & {"weight_scale", "scales"}
    }


def matrices(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Module to its matrix ``[out, in]`` in float64, from a checkpoint of any packaging.

    `dtype` is the model's, in which vLLM's layers hold the scales of integers.
    """
    return {name: matrix_of(parts, dtype) for name, parts in layers_in(path).items()}


def matrix_of(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if "weight_scale_2" in parts:  # ModelOpt's NVFP4
        halves = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).flatten(1).long()
        values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)[halves]
        scale = parts["weight_scale"].double() * parts["weight_scale_2"].double()
        return by_group(values, scale)
    if "qzeros" in parts and "g_idx" in parts:  # GPTQ
        values = nibbles(parts["qweight"].t()) - 8
        return by_group(values.double(), parts["scales"].t().to(dtype).double())
    if "qzeros" in parts:  # AWQ
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        value, zero = (
            nibbles(parts[name]).unflatten(1, (-1, 8))[..., order].flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        scale = parts["scales"].t().to(dtype).double()
        return by_group((value - zero.repeat_interleave(GROUP, 1)).double(), scale)
    if "weight_packed" in parts:  # compressed-tensors' integers
        bits = 32 * parts["weight_packed"].shape[1] // int(parts["weight_shape"][1])
        values, zero = nibbles(parts["weight_packed"], bits), 1 << (bits - 1)
        if "weight_zero_point" in parts:
            zero = nibbles(parts["weight_zero_point"].t()).t().repeat_interleave(GROUP, 1)
        return by_group((values - zero).double(), parts["weight_scale"].to(dtype).double())
    return parts["weight"].double() * parts["weight_scale"].double()


def nibbles(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The unsigned numbers in 32-bit words, lowest bits first; int64."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def by_group(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


def dequantized(path: Path, family: str, out: Path) -> Path:
    """The same numbers as an unquantized checkpoint in float32."""
    source = TINY / FAMILIES[family]
    shutil.copytree(source, out)
    found = {name: matrix.float() for name, matrix in matrices(path).items()}
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        tensors[name] = tensors[name].float()
        module = name.removesuffix(".weight")
        if module in found:
            tensors[name] = found[module]
        elif match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name):
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            tensors[name] = torch.stack(
                [
                    torch.cat([found[f"{match[1]}.{expert}.{part}_proj"] for part in parts])
                    for expert in range(len(tensors[name]))
                ]
            )
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return out


# INT4 has no kernel for float32. The checkpoint says how long its blocks are.
HALF: dict[str, Any] = {**TEXT_ONLY_OPTIONS, "dtype": "bfloat16", "diffusion_config": None}
SCHEMES = {"llada2": MIXED, "gemma": MIXED, "sdar": {n: MIXED[n] for n in MIXED if n != "nvfp4"}}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of a weight: it, its input and the product are rounded to bfloat16.
BUDGET = 3 * 2.0**-8
# Rows of the identity are rounded as activations are: exactly to FP8 and INT8 with a scale of their
# own; to NVFP4 with a group's scale, which is a number of four bits itself.
NVFP4_BUDGET = 2.0**-3
# Of float8 (e4m3).
SMALLEST_NORMAL, LARGEST = 2.0**-6, 448


@pytest.fixture(scope="module")
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8, INT8, INT4 and NVFP4 in one checkpoint of a family, a layer each."""
    family = request.param
    return quantized(tmp_path_factory.mktemp(family), family, SCHEMES[family])


def encoded(family: str, count: int = 42) -> list[Example]:
    if family == "sdar":
        tokenizer = sdar_tokenizer()
        encoder = Encoder(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    else:
        gemma = family == "gemma"
        encoder = Encoder(gemma_processor().tokenizer if gemma else llada2_tokenizer())
    return [encoder(problem) for problem in held_out_set(6)][:count]


def solved(running: Engine, examples: list[Example]) -> float:
    """The share of right answers."""
    params = [greedy(64) for _ in examples]
    got = running.generate([example.prompt for example in examples], params)
    right = sum(tokens == e.answer for (tokens, _), e in zip(got, examples, strict=True))
    return right / len(examples)


def by_the_library(path: Path) -> dict[str, torch.Tensor]:
    """Module to its matrix, by the own library of each scheme."""
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
        found[renamed(module)] = compressor.decompress(state, scheme)["weight"].float()
    return found


def renamed(module: str) -> str:
    """A module of a checkpoint as the engine's model names it."""
    plain = module.replace("decoder.", "").removeprefix("language_model.")
    return re.sub(r"^encoder\.", "model.", plain)


def in_float64(path: Path) -> dict[str, torch.Tensor]:
    """Module to its matrix, by what its tensors mean."""
    return {renamed(name): matrix for name, matrix in matrices(path, torch.bfloat16).items()}


def experts_of(running: Engine) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    modules = running.runner.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, RoutedExperts)}


def linear_layers(
    running: Engine, exact: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """(name of its first part, layer, what its matrix should be) of quantized linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    for name, layer in running.runner.model.named_modules():
        prefix, _, last = name.removeprefix("language_model.").rpartition(".")
        parts = [f"{prefix}.{part}" for part in FUSED.get(last, (last,))]
        if isinstance(layer, LinearBase) and parts[0] in exact:
            # A full-attention layer of DiffusionGemma takes its keys for values.
            parts = [part if part in exact else part.replace("v_proj", "k_proj") for part in parts]
            yield parts[0], layer, torch.cat([exact[part] for part in parts])


def check_linear_layers(running: Engine, path: Path, exact: dict[str, torch.Tensor]) -> set[str]:
    """Each layer's product with rows of one number is the file's matrix, up to rounding.

    The number is one that static scales of inputs keep as it is: the largest of their range.
    Returns the numbers of the layers.
    """
    inputs = {
        renamed(name): float(parts["input_scale"])
        for name, parts in layers_in(path).items()
        if "input_scale" in parts
    }
    float8 = path.name.endswith("modelopt-fp8")
    steps, seen = (448 if float8 else 6 * 448), set()
    for name, layer, matrix in linear_layers(running, exact):
        number = inputs.get(name, 1 / steps) * steps
        matrix = matrix.double()
        product, _ = layer((number * torch.eye(matrix.shape[1])).bfloat16())
        bias = 0 if layer.bias is None else layer.bias.double()
        error = (product.double() - bias).T / number - matrix
        fourth = "nvfp4" in path.name and "modelopt" not in path.name and ".layers.4." in name
        limit = (NVFP4_BUDGET if fourth else BUDGET) * (matrix.abs() + 1e-9)
        if layer.bias is not None:  # it is added before the product is rounded
            limit = limit + 2.0**-8 * layer.bias.double().abs()[:, None] / number
        if float8 and torch.cpu._is_amx_tile_supported():
            # With AMX vLLM's kernel reads subnormal numbers, zero among them, as normal ones.
            limit = limit + 2 * SMALLEST_NORMAL / LARGEST * matrix.abs().max()
        assert (error.abs() <= limit).all(), (name, float(error.abs().max()))
        seen |= set(re.findall(r"layers\.(\d+)", name))
    return seen


def check_experts(running: Engine, exact: dict[str, torch.Tensor], of_all: bool = True) -> None:
    """Experts that are dequantized are the file's to the bit, in all layers or in some.

    For processors with AMX vLLM has a kernel of its own, which keeps the experts as integers.
    """
    compared, layers = 0, experts_of(running)
    for name, layer in layers.items():
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
    assert compared == len(layers) if of_all else compared == len(MIXED)


# ---- Schemes


@pytest.mark.parametrize(
    "mixed", ["llada2", "sdar", pytest.param("gemma", marks=pytest.mark.long)], indirect=True
)
def test_all_schemes_in_one_checkpoint(mixed: Path) -> None:
    """A scheme a layer: answers stay right, and matrices are what the schemes' library says."""
    family = next(name for name, tiny in FAMILIES.items() if mixed.name.startswith(tiny))
    examples = encoded(family)
    with engine(TINY / FAMILIES[family], 0, **HALF) as running:
        before = solved(running, examples)
    with engine(mixed, 0, **HALF) as running:
        after = solved(running, examples)
        exact = by_the_library(mixed)
        layers = check_linear_layers(running, mixed, exact)
        assert layers == set("1234"[: len(SCHEMES[family])])
        if experts_of(running):
            check_experts(running, exact, of_all=False)
    assert after >= 0.9 * before, (after, before)
    assert before >= 0.75


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llada2", {}),
        # Compiled, as a server is unless told not to: experts branch on what a router chose.
        pytest.param("llada2", {"enforce_eager": False}, marks=pytest.mark.long),
        ("gemma", {}),
        pytest.param("gemma", {"enforce_eager": False}, marks=pytest.mark.long),
        ("llada2", {"quantization": "fp8", "dtype": "bfloat16"}),
        pytest.param("gemma", {"quantization": "fp8", "dtype": "bfloat16"}, marks=pytest.mark.long),
    ],
)
def test_a_calibrated_checkpoint_and_an_unquantized_one(
    family: str, options: dict[str, Any]
) -> None:
    """NVFP4, whose scales were calibrated, or FP8 that vLLM makes while it loads."""
    calibrated = CALIBRATED / f"{FAMILIES[family]}-nvfp4"
    path = TINY / FAMILIES[family] if "quantization" in options else calibrated
    with engine(path, 0, **{**TEXT_ONLY_OPTIONS, "diffusion_config": None, **options}) as running:
        assert solved(running, encoded(family, 21)) >= 0.6


def of_a_type_without_kernels(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": [32, 32]}


def of_a_scheme_that_nobody_has(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"num_bits": 4, "type": "int"}


def with_groups_of_another_type(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """It would start, and answer with numbers that are made of other numbers' bits."""
    fp8, int8, *_ = config["quantization_config"]["config_groups"].values()
    fp8["targets"], int8["targets"] = int8["targets"], fp8["targets"]


def without_a_scale(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    part = "experts.3.up_proj.weight_scale"
    del tensors[next(name for name in tensors if name.endswith(part))]


@pytest.mark.parametrize("mixed", ["llada2"], indirect=True)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (of_a_type_without_kernels, "Failed to find a kernel"),
        (of_a_scheme_that_nobody_has, "No compressed-tensors compatible scheme"),
        (
            with_groups_of_another_type,
            r"is stored as (int8|float8_e4m3fn), but by quantization_config as (int8|float8_e4m3)",
        ),
        (without_a_scale, r"experts\.3\.up_proj\.weight_scale"),
    ],
)
def test_what_does_not_fit_is_refused(
    mixed: Path, tmp_path: Path, change: Callable[..., None], complaint: str
) -> None:
    path = Path(shutil.copytree(mixed, tmp_path / mixed.name))
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=complaint), engine(path, 0, **HALF):
        pass


# ---- Packagings

INTEGERS = ("gptq", "awq", "w8a16", "w4a16-asymmetric")
FLOATING = ("modelopt-fp8", "modelopt-nvfp4")
# Checkpoints of other families; vLLM has no kernel for a CPU for GPTQ's and AWQ's experts of
# width 64.
OTHERS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "sdar": (lambda path: TINY_SDAR, (*FLOATING, *INTEGERS)),
    "sdar-moe": (partial(random_sdar, experts=True, block=4), (*FLOATING, "w8a16")),
    "nemotron": (partial(random_nemotron, block=4), (*FLOATING, *INTEGERS)),
    "fast-dllm": (partial(random_fast_dllm, block=8), (*FLOATING, *INTEGERS)),
    "dream": (partial(random_dream, block=8), (*FLOATING, *INTEGERS)),
    "openpangu": (partial(random_openpangu, block=8), (*FLOATING, *INTEGERS)),
    "sdar-vl": (partial(sdar_checkpoint, block=4), (*FLOATING, *INTEGERS)),
    "nemotron-vlm": (partial(nemotron_checkpoint, block=4), (*FLOATING, *INTEGERS)),
}
WEIGHTS = [
    (f, case) for f in ("gemma", "llada2") for case in ("w8a16", "w4a16", "w4a16-asymmetric")
]
QUICK = [("gemma", case) for case in ("modelopt-fp8", "modelopt-nvfp4", "awq", "gptq")]
EVERY = [
    *((family, case) for family in ("gemma", "llada2") for case in CASES),
    *((family, case) for family, (_, some) in OTHERS.items() for case in some),
]


@pytest.mark.parametrize(("family", "case"), long_but(QUICK, EVERY))
def test_every_layer_is_what_the_file_says(family: str, case: str, tmp_path: Path) -> None:
    """And trained models' answers stay right."""
    source = OTHERS[family][0](tmp_path / "source") if family in OTHERS else None
    path = packaged(tmp_path, family, case, source)
    exact = in_float64(path)
    with engine(path, 0, **HALF) as running:
        if family in OTHERS:
            prompts = [[(7 * i + n) % 250 for i in range(20)] for n in range(4)]
            got = running.generate(prompts, [greedy(24, ignore_eos=True)] * 4)
            assert all(len(tokens) == 24 for tokens, _ in got)
        else:
            assert solved(running, encoded(family, 14)) >= 0.8
        assert check_linear_layers(running, path, exact)
        check_experts(running, exact)


@pytest.mark.parametrize(("family", "case"), long_but(WEIGHTS[:1], WEIGHTS))
def test_weights_alone_give_the_tokens_of_their_numbers(
    family: str, case: str, tmp_path: Path
) -> None:
    """In float32 the same numbers, unquantized, give the same tokens."""
    path = packaged(tmp_path, family, case)
    plain = dequantized(path, family, tmp_path / path.name.replace(case, "plain"))
    prompts = [example.prompt for example in encoded(family)]
    answers = []
    for served in (path, plain):
        with engine(served, 0, **(HALF | {"dtype": "float32"})) as running:
            params = [greedy(64, ignore_eos=True) for _ in prompts]
            answers.append([tokens for tokens, _ in running.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.long
def test_two_schemes_of_modelopt(tmp_path: Path) -> None:
    """FP8 everywhere, and experts in NVFP4."""
    path, other = (packaged(tmp_path, "gemma", f"modelopt-{name}") for name in ("fp8", "nvfp4"))
    tensors, exact = {}, {}
    for folder, experts in ((path, False), (other, True)):
        for found, these in (
            (tensors, load_file(folder / "model.safetensors")),
            (exact, in_float64(folder)),
        ):
            found |= {name: it for name, it in these.items() if (".experts." in name) is experts}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "MIXED_PRECISION"
    config["quantization_config"]["quantized_layers"] = {
        name: {"quant_algo": "NVFP4", "group_size": 16}
        if ".experts." in name
        else {"quant_algo": "FP8"}
        for name in layers_in(path)
    }
    (path / "config.json").write_text(json.dumps(config))
    with engine(path, 0, **HALF) as running:
        assert solved(running, encoded("gemma", 14)) >= 0.8
        dtypes = [layer.weight.dtype for _, layer, _ in linear_layers(running, exact)]
        assert dtypes and torch.uint8 not in dtypes
        check_experts(running, exact)
