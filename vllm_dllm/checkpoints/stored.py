"""How tensors are stored in a checkpoint, for all that read or verify one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

Shapes = Mapping[str, tuple[int, ...]]
Weights = Iterable[tuple[str, torch.Tensor]]
FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class Stored(NamedTuple):
    """How a checkpoint stores a tensor.

    Attributes:
        shape: its shape; None if it is not known, and so not checked.
        dtypes: the dtypes it may have.
        group: a description of the part of `quantization_config` that asks for it; "" for none.
    """

    shape: tuple[int, ...] | None
    dtypes: frozenset[torch.dtype] = FLOATS
    group: str = ""
