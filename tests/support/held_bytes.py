"""Bytes of tensors that a model, or an object of this package, holds."""

from __future__ import annotations

from typing import Any

import torch


def model_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of the parameters and of the buffers of a model; each tensor once.

    The shapes that stand beside packed matrices, at most 16 bytes each, are left out.
    """
    named = model.named_parameters()
    return {
        "parameters": sum(t.nbytes for name, t in named if not name.endswith("weight_shape")),
        "buffers": sum(tensor.nbytes for tensor in model.buffers()),
    }


def tensor_bytes(held: Any) -> int:
    """Bytes of all tensors that an object of this package holds, each once."""
    seen: set[int] = set()

    def count(thing: Any) -> int:
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            return thing.nbytes
        if isinstance(thing, dict):
            return sum(map(count, thing.values()))
        if isinstance(thing, list | tuple):
            return sum(map(count, thing))
        ours = type(thing).__module__.startswith("vllm_dllm.worker")
        return count(vars(thing)) if ours and hasattr(thing, "__dict__") else 0

    return count(held)
