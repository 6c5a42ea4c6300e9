"""Loads updates of a running engine's weights, which may be partial.

An update would lead to wrong tokens after an earlier one that failed half-way, and where stored
keys and values have addresses that do not reflect it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm_dllm.checkpoints.stored import Weights

# Kernels that read experts as the checkpoint stores them, and the one that `vllm_cpu_v2` unpacks.
_KNOWN_EXPERTS = (
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.CPU,
)


def load_reload(model: Any, weights: Weights) -> set[str]:
    """Load any part of a checkpoint in one of vLLM's reloads; raises ValueError if it is wrong."""
    _refuse_wrong_updates(model)
    try:
        loaded: set[str] = model.load_verified(model.verified_weights(weights, whole=False))
    except Exception as error:
        model.failed_update = f"{error}"
        raise
    return loaded


def load_bucket(model: Any, weights: Weights) -> set[str]:
    """Load any part of a checkpoint as worker extensions of trainers send it, without a reload.

    All tensors are verified before the first is written, and packed layers are packed again. Raises
    ValueError if a tensor is wrong, its layer's layout is not known, or no update is possible.
    """
    _refuse_wrong_updates(model)
    bucket = list(weights)
    for name, _ in bucket:
        _refuse_unknown_layout(model, name)
    bucket = list(model.verified_weights(bucket, whole=False))
    plain: AbstractContextManager[None] = nullcontext()
    if current_platform.is_cpu():  # only its kernels pack layers
        from vllm_cpu_v2.packed_layers import unpacked

        plain = unpacked(model)
    with set_current_vllm_config(model.vllm_config), plain:
        loaded: set[str] = model.load_verified(bucket)
    return loaded


def _refuse_unknown_layout(model: Any, name: str) -> None:
    """Raise a ValueError if a tensor's layer keeps its weights in a layout of its own."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    if model.vllm_config.quant_config is not None:
        reason = "the model is quantized"
    elif ".experts." in name and any(
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.unquantized_backend not in _KNOWN_EXPERTS
        for method in methods
    ):
        reason = "its kernel has packed the experts"
    else:
        return
    raise ValueError(
        f"{name!r} cannot be updated by the model's `load_weights`: {reason}; use `reload_weights`"
    )


def _refuse_wrong_updates(model: Any) -> None:
    if model.failed_update is not None:
        raise ValueError(
            "an earlier update of the weights failed half-way and left the engine without whole "
            f"weights ({model.failed_update}); start the engine again"
        )
    if has_kv_transfer_group():
        raise ValueError(
            "weights cannot be updated in an engine with --kv-transfer-config: its keys and values "
            "are stored under the checkpoint that it started with"
        )
