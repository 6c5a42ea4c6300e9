"""Start-up checks of quantization, which refuse schemes without a kernel here by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_dllm.checkpoints.quantized import COMPRESSED, schemes, word_of
from vllm_dllm.checkpoints.quantized import in_words as in_words_of
from vllm_dllm.checkpoints.verify import ONLINE
from vllm_dllm.checkpoints.vllm_layers import in_words
from vllm_dllm.ranges import SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.dllm")

# (bits, type, strategy) of weights and activations; for activations also whether they are dynamic.
_INT8 = ((8, "int", "channel"), (8, "int", "token", True))
_FP8 = (
    ((8, "float", "channel"), (8, "float", "token", True)),
    ((8, "float", "tensor"), (8, "float", "tensor", False)),
)
_FP8_BLOCK = ((8, "float", "block"), (8, "float", "group", True))
_NVFP4 = ((4, "float", "tensor_group"), (4, "float", "tensor_group", True))
_INTEGERS = {((bits, "int", by), None) for bits in (4, 8) for by in ("group", "channel")}
_PACKED = "pack-quantized"
_ON_CPU = {_INT8, *_FP8, _NVFP4}
_MODELOPT = ("FP8", "NVFP4")
# vLLM gives other groups of GPTQ and AWQ, and experts of other widths, to kernels for GPUs only.
_GROUPS, _EXPERT_UNIT = (-1, 32, 64, 128), 128
_WORDS = (
    "compressed-tensors (FP8 weights by channel with dynamic activations by token, FP8 by tensor, "
    "INT8 weights by channel with dynamic activations by token, INT4 and INT8 weights by group or "
    "channel, NVFP4), ModelOpt (FP8, NVFP4), AWQ and GPTQ of 4 bits; or serve an unquantized "
    "checkpoint with --quantization fp8"
)


def check(vllm_config: VllmConfig) -> None:
    """Log a quantized checkpoint's schemes; refuse those that vLLM's CPU build has no kernel for.

    On other platforms vLLM itself refuses them when it builds the layers.

    Raises:
        SettingsError: there is no kernel; the message names the scheme and the platform.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    quant_config = vllm_config.quant_config
    if quant_config is None:
        quant_config = VllmConfig._get_quantization_config(
            vllm_config.model_config, vllm_config.load_config
        )
    method = quant_config.get_name()
    found = schemes(quant_config) if method == COMPRESSED else [in_words(quant_config)]
    logger.info("dllm: quantized checkpoint: %s", "; ".join(found))
    if not current_platform.is_cpu():
        return
    where = f"the CPU platform ({current_platform.get_device_name()})"
    if method == COMPRESSED:
        for group in quant_config.target_scheme_map.values():
            layout = group.get("format") or quant_config.quant_format
            _check_scheme(group["weights"], group["input_activations"], layout, where)
    elif not _has_kernel(quant_config, vllm_config.model_config):
        raise SettingsError(
            f"quantization {found[0]!r} has no kernel on {where}; what it has: {_WORDS}"
        )


def _has_kernel(quant_config: Any, model_config: ModelConfig) -> bool:
    """Whether a CPU computes the scheme of a method other than compressed-tensors."""
    method = quant_config.get_name()
    if method in ("modelopt", "modelopt_fp4"):
        return quant_config.quant_method in _MODELOPT
    if method == "modelopt_mixed":
        layers = quant_config.quantized_layers.values()
        return all(layer["quant_algo"].upper() in _MODELOPT for layer in layers)
    if method in ("auto_awq", "auto_gptq"):
        hidden = model_config.hf_text_config.hidden_size
        usual = quant_config.group_size in _GROUPS
        return quant_config.weight_bits == 4 and (
            (usual and hidden % _EXPERT_UNIT == 0) if model_config.is_moe else usual
        )
    return method == ONLINE and _is_fp8_by_tensor(quant_config)


def _check_scheme(weights: Any, inputs: Any, layout: str, where: str) -> None:
    key = (_key(weights)[:3], None if inputs is None else _key(inputs))
    symmetric = weights.symmetric and (inputs is None or inputs.symmetric)
    # Zero points have a kernel beside activations that are not quantized.
    if layout == _PACKED if key in _INTEGERS else key in _ON_CPU and symmetric:
        return
    why = "no kernel"
    if key == _FP8_BLOCK:
        if torch.cpu._is_amx_tile_supported():
            return
        why = "no kernel without AMX, which this processor lacks,"
    raise SettingsError(
        f"quantization scheme {in_words_of(weights, inputs)!r} has {why} on {where}; what it has: "
        f"{_WORDS}"
    )


def _key(args: Any) -> tuple[Any, ...]:
    return args.num_bits, word_of(args.type), word_of(args.strategy), bool(args.dynamic)


def _is_fp8_by_tensor(quant_config: Any) -> bool:
    """Whether an unquantized checkpoint is quantized to FP8 with one scale per tensor."""
    from vllm.config.quantization import resolve_quantization_config

    return quant_config.args == resolve_quantization_config("fp8_per_tensor", None)
