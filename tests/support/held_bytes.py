"""Bytes of tensors that a model, or an object of this package, holds."""

from __future__ import annotations

import re
from typing import Any

import torch

# Beside packed matrices their shape, at most 16 bytes each; and the scales of a quantized KV cache,
# less than 32 bytes a layer.
FEW = re.compile(r"weight_shape$|\.attn\.\w+_(scale|zero_point)$")


def model_bytes(model: torch.nn.Module) -> dict[str, int]:
    named = model.named_parameters()
    return {
        "parameters": sum(tensor.nbytes for name, tensor in named if not FEW.search(name)),
        "buffers": sum(tensor.nbytes for tensor in model.buffers()),
    }


def tensor_bytes(held: Any) -> int:
    seen: set[int] = set()
    places: set[int] = set()

    def count(thing: Any) -> int:
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            memory = thing.untyped_storage()
            known = memory.data_ptr() in places
            places.add(memory.data_ptr())
            return 0 if known else memory.nbytes()
        if isinstance(thing, dict):
            return sum(map(count, thing.values()))
        if isinstance(thing, list | tuple):
            return sum(map(count, thing))
        ours = type(thing).__module__.startswith("vllm_dllm.engine")
        return count(vars(thing)) if ours and hasattr(thing, "__dict__") else 0

    return count(held)
