"""The tensors of a checkpoint that transformers' class of the model can save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_dllm.checkpoints.stored import Shapes


def shapes_of(authors: Callable[[Any], torch.nn.Module], config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name; `authors` makes the model from its `config`."""
    with torch.device("meta"):
        tensors = authors(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def one_by_one(
    shapes: Shapes, chosen: Callable[[str], bool] = lambda experts: True
) -> dict[str, tuple[int, ...]]:
    """Shapes with three matrices for each expert in place of two tensors for all of them.

    Args:
        shapes: as transformers stores them: ``gate_up_proj`` ``[experts, 2 * size, hidden]`` and
            ``down_proj`` ``[experts, hidden, size]``.
        chosen: which layers' experts to separate, by the name before these.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts") or not chosen(experts):
            found[name] = shape
        elif part == "gate_up_proj":
            count, both, hidden = shape
            for expert in range(count):
                for one, two_dim in (
                    ("gate_proj", (both // 2, hidden)),
                    ("up_proj", (both // 2, hidden)),
                    ("down_proj", (hidden, both // 2)),
                ):
                    found[f"{experts}.{expert}.{one}.weight"] = two_dim
    return found
