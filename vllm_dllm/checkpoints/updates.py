"""Loads what a model's ``load_weights`` receives: first a checkpoint, later partial updates."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Weights = Iterable[tuple[str, torch.Tensor]]
# Kernels that read experts as the checkpoint stores them, and the one that `vllm_cpu_v2` unpacks.
_KNOWN_EXPERTS = (
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.CPU,
)


class UpdatableWeights:
    """Comes before vLLM's class among the bases of a model class.

    A trainer sends new weights to a running engine in as many parts as it likes (vLLM's weight
    transfer), so only the checkpoint that an engine starts with can be required to be complete.
    """

    _failed_update: str | None = None
    _has_weights = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self._vllm_config = vllm_config

    def process_weights_after_loading(self) -> None:
        """Called by vLLM once, after it has packed the first weights."""
        self._has_weights = True
        text_config = self._vllm_config.model_config.hf_text_config
        if current_platform.is_cpu() and text_config.tie_word_embeddings:
            from vllm_cpu_v2.packed_layers import share_tied_matrices

            share_tied_matrices(cast(torch.nn.Module, self))

    def verified_weights(self, weights: Weights, whole: bool) -> Weights:
        """Pass a checkpoint's tensors on, and raise a ValueError for one that is wrong.

        Unless a class overrides this, all of them are passed on.

        Args:
            weights: the names in a checkpoint's files, and the tensors.
            whole: whether every tensor of the checkpoint must be present.
        """
        return weights

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint, or later an update, which may be partial.

        Apart from vLLM's ways to update weights, this may be called directly, as the worker
        extensions of trainers do. In that case all tensors are verified before the first is
        written, and packed layers are packed again before it returns.

        Raises:
            ValueError: a tensor is wrong, or missing at the start; the message names it. It is also
                raised for updates that would lead to wrong tokens: after an update that failed
                half-way, with stored keys and values whose addresses do not reflect the update, and
                directly if a layer's layout is not known.
        """
        # An engine that started with dummy weights gets all of them as an update.
        if get_layerwise_info(cast(torch.nn.Module, self)).kernel_tensors is not None:
            return self._load_a_reload(weights)
        if not self._has_weights:
            return self._load_verified(self.verified_weights(weights, whole=True))
        self._refuse_wrong_updates()
        bucket = list(weights)
        for name, _ in bucket:
            self._refuse_unknown_layout(name)
        bucket = list(self.verified_weights(bucket, whole=False))
        with set_current_vllm_config(self._vllm_config), self._unpacked():
            return self._load_verified(bucket)

    def _load_a_reload(self, weights: Weights) -> set[str]:
        """Load weights that come between the start and the end of one of vLLM's reloads."""
        self._refuse_wrong_updates()
        try:
            return self._load_verified(self.verified_weights(weights, whole=False))
        except Exception as error:
            self._failed_update = f"{error}"
            raise

    def _load_verified(self, weights: Weights) -> set[str]:
        loader: Any = super()
        loaded: set[str] = loader.load_weights(weights)
        return loaded

    def _unpacked(self) -> AbstractContextManager[None]:
        """A context in which loaders write plain tensors; only a CPU's kernels pack them."""
        if not current_platform.is_cpu():
            return nullcontext()
        from vllm_cpu_v2.packed_layers import unpacked

        return unpacked(cast(torch.nn.Module, self))

    def _refuse_unknown_layout(self, name: str) -> None:
        """Raise a ValueError if a tensor's layer keeps its weights in a layout of its own."""
        methods = (
            getattr(layer, "quant_method", None) for layer in cast(torch.nn.Module, self).modules()
        )
        if self._vllm_config.quant_config is not None:
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
            f"{name!r} cannot be updated by the model's `load_weights`: {reason}; use "
            "`reload_weights`"
        )

    def _refuse_wrong_updates(self) -> None:
        if self._failed_update is not None:
            raise ValueError(
                "an earlier update of the weights failed half-way and left the engine without "
                f"whole weights ({self._failed_update}); start the engine again"
            )
        if has_kv_transfer_group():
            raise ValueError(
                "weights cannot be updated in an engine with --kv-transfer-config: its keys and "
                "values are stored under the checkpoint that it started with"
            )
