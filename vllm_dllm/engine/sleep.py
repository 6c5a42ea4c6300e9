"""Keep an engine's tensors when it sleeps.

Level 2 of vLLM's sleep gives up the memory of everything that was made while the model was loaded,
and saves the model's buffers. The state of slots is made then, too, and some of it is written only
once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

# Packages whose objects are not searched: what vLLM holds is for vLLM to restore.
OTHERS = frozenset({"builtins", "vllm", "torch", "transformers", "numpy"})


def keep_asleep(model: nn.Module, owner: Any) -> None:
    """Make the tensors that `owner` and the layers of `model` hold buffers of the model.

    A tensor that is a view is kept as what it is a view of.
    """
    kept = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()
    left = [owner, *model.modules()]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            base = each if each._base is None else each._base
            if id(base) not in kept:
                kept.add(id(base))
                model.register_buffer(f"_dllm_{len(kept)}", base, persistent=False)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, (list, tuple)):
            left += each
        elif type(each).__module__.partition(".")[0] not in OTHERS:
            with suppress(TypeError):  # it has slots
                left += vars(each).values()
