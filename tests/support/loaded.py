"""What each rank of an engine with `Recorder` as its `worker_extension_cls` holds.

The bytes of the model are noted before layers are prepared for their kernels: a CPU build of vLLM
keeps packed copies of some weights and drops the weights themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import base_loader

from tests.support.held_bytes import model_bytes, tensor_bytes

_held: dict[str, int] = {}
_prepare = base_loader.process_weights_after_loading


def _noting(model: torch.nn.Module, *rest: Any, **named: Any) -> None:
    _held.update(model_bytes(model))
    _prepare(model, *rest, **named)


base_loader.process_weights_after_loading = _noting


class Recorder:
    model_runner: Any

    def held(self) -> dict[str, int]:
        """Bytes of this rank's model, and of this package's state for its requests."""
        state = self.model_runner.model_state
        parts = state.parts
        own = tensor_bytes([state.slots, parts.constraints, parts.rows, parts.logprobs])
        own -= state.slots.history.nbytes  # vLLM's
        if state.embeddings is not None:
            own += state.embeddings.conditioning.soft.nbytes
        return _held | {"state": own, "slots": len(state.slots.phase)}


def cache_report(llm: Any) -> dict[str, int]:
    """What the engine says of its KV cache: blocks, tokens, and tokens that may be under way."""
    config = llm.llm_engine.engine_core.engine_core.vllm_config
    return {
        "blocks": config.cache_config.num_gpu_blocks,
        "tokens": config.cache_config.kv_cache_size_tokens,
        "page": config.cache_config.block_size,
        "context": config.model_config.max_model_len,
        "in_flight": config.max_in_flight_tokens,
    }
