"""Start-up checks of quantization, which refuse schemes without a kernel here by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_dllm.checkpoints.quantized import COMPRESSED, in_words, schemes, word_of
from vllm_dllm.checkpoints.verify import ONLINE
from vllm_dllm.ranges import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

# (bits, type, strategy) of weights and activations; for activations also whether they are dynamic.
_INT8 = ((8, "int", "channel"), (8, "int", "token", True))
_FP8 = (
    ((8, "float", "channel"), (8, "float", "token", True)),
    ((8, "float", "tensor"), (8, "float", "tensor", False)),
)
_FP8_BLOCK = ((8, "float", "block"), (8, "float", "group", True))
_INT4 = ((4, "int", "group"), None)
_NVFP4 = ((4, "float", "tensor_group"), (4, "float", "tensor_group", True))
_ON_CPU = {_INT8, *_FP8, _INT4, _NVFP4}
_WORDS = (
    "FP8 weights by channel with dynamic activations by token, FP8 by tensor, INT8 weights by "
    "channel with dynamic activations by token, symmetric INT4 weights by group, NVFP4"
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
    if method == COMPRESSED:
        logger.info("dllm: quantized checkpoint: %s", "; ".join(schemes(quant_config)))
    if not current_platform.is_cpu():
        return
    where = f"the CPU platform ({current_platform.get_device_name()})"
    if method == COMPRESSED:
        for group in quant_config.target_scheme_map.values():
            _check_scheme(group["weights"], group["input_activations"], where)
            _check_dtype(group["weights"], vllm_config.model_config.dtype, where)
    elif method != ONLINE or not _is_fp8_by_tensor(quant_config):
        raise SettingsError(
            f"quantization {vllm_config.model_config.quantization!r} has no kernels for experts "
            f"on {where}; serve a compressed-tensors checkpoint ({_WORDS}), or an unquantized one "
            "with --quantization fp8"
        )


def _check_scheme(weights: Any, inputs: Any, where: str) -> None:
    key = (_key(weights)[:3], None if inputs is None else _key(inputs))
    if not weights.symmetric or (inputs is not None and not inputs.symmetric):
        key = (("asymmetric",), None)
    if key in _ON_CPU:
        return
    why = "no kernel"
    if key == _FP8_BLOCK:
        if torch.cpu._is_amx_tile_supported():
            return
        why = "no kernel without AMX, which this processor lacks,"
    raise SettingsError(
        f"quantization scheme {in_words(weights, inputs)!r} has {why} on {where}; what it has: "
        f"{_WORDS}"
    )


def _check_dtype(weights: Any, dtype: torch.dtype, where: str) -> None:
    """Refuse a dtype that INT4 kernels lack, because they would raise only at the first request."""
    if dtype == torch.float32 and _key(weights)[:3] == _INT4[0]:
        raise SettingsError(
            f"--dtype float32: INT4 weights have a kernel for bfloat16 and float16 only on {where}"
        )


def _key(args: Any) -> tuple[Any, ...]:
    return args.num_bits, word_of(args.type), word_of(args.strategy), bool(args.dynamic)


def _is_fp8_by_tensor(quant_config: Any) -> bool:
    """Whether an unquantized checkpoint is quantized to FP8 with one scale per tensor."""
    from vllm.config.quantization import resolve_quantization_config

    return quant_config.args == resolve_quantization_config("fp8_per_tensor", None)
