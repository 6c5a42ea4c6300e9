"""What comes to a model's ``load_weights``: a whole checkpoint at first, later updates in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

Weights = Iterable[tuple[str, torch.Tensor]]


class UpdatableWeights:
    """Comes before vLLM's class among the bases of a model class.

    A trainer sends new weights to a running engine in as many parts as it likes (vLLM's weight
    transfer), so that only the checkpoint that an engine starts with can be required to be whole.
    """

    _has_weights = False
    _failed_update: str | None = None

    def verified_weights(self, weights: Weights, whole: bool) -> Weights:
        """Pass tensors of a checkpoint on, and raise a ValueError for one that is wrong.

        Unless a class overrides this, all of them are passed on.

        Args:
            weights: names of a checkpoint's files, and tensors.
            whole: no tensor of the checkpoint may be missing.
        """
        return weights

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint, and later an update, which may be a part of one.

        Raises:
            ValueError: a tensor is wrong, or missing at the start; the message names it. Also for
                updates that would give wrong tokens: after one that failed half-way, and beside
                stored keys and values, whose addresses do not know of it.
        """
        # An engine that started with invented weights gets all of them as an update.
        is_update = self._has_weights or _is_reloading(self)
        self._has_weights = True
        if is_update:
            self._refuse_wrong_updates()
        try:
            loader: Any = super()
            loaded: set[str] = loader.load_weights(
                self.verified_weights(weights, whole=not is_update)
            )
        except Exception as error:
            self._failed_update = f"{error}" if is_update else None
            raise
        return loaded

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


def _is_reloading(model: Any) -> bool:
    """Whether vLLM has begun to replace the weights of a model."""
    return get_layerwise_info(model).kernel_tensors is not None
