"""Checkpoints that do not fit are refused by the first tensor's name, before a server is up."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from safetensors import SafetensorError

# In the file of a model that ties its head to the embedding it may stand as well; nobody reads it.
HEAD = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]


def verified(
    weights: Iterable[tuple[str, torch.Tensor]],
    expected: Shapes,
    architecture: str,
    one_name: Callable[[str], str | None] = lambda name: name,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, and raise unless they are exactly the `expected` tensors.

    `one_name` maps a tensor's name in the file to its name in `expected`, for tensors that may
    stand under several; None drops a tensor that nobody reads.

    Raises:
        ValueError: an unreadable file, a tensor that the architecture does not have, one of
            another shape, or, when all have passed, one that was missing.
    """
    missing = set(expected)
    for name, tensor in _readable(weights):
        known = one_name(name)
        if known is None or (known == HEAD and HEAD not in expected):
            continue
        if known not in expected:
            close = difflib.get_close_matches(known, missing, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"not a {architecture} checkpoint: unexpected tensor {name!r}{hint}")
        if tuple(tensor.shape) != expected[known]:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but config.json asks for "
                f"{expected[known]}"
            )
        missing.discard(known)
        yield name, tensor
    if missing:
        names = sorted(missing)
        raise ValueError(
            f"the checkpoint lacks {len(names)} of {architecture}'s tensors: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        )


def _readable(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from weights
    except SafetensorError as error:
        raise ValueError(
            f"a safetensors file of the checkpoint is damaged or incomplete ({error}); "
            "fetch it again"
        ) from error
