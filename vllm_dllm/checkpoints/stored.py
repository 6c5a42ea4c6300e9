"""How tensors are stored in a checkpoint, for all that read or verify one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

Shapes = Mapping[str, tuple[int, ...]]
Weights = Iterable[tuple[str, torch.Tensor]]
FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class Stored(NamedTuple):
    """How a checkpoint stores a tensor.

    Attributes:
        shape: its shape; None if it is not known, and so not checked.
        dtypes: the dtypes it may have.
        quantized: whether `quantization_config` asks for it.
    """

    shape: tuple[int, ...] | None
    dtypes: frozenset[torch.dtype] = FLOATS
    quantized: bool = False


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
