"""Verification of checkpoints: a wrong one is refused, by its first wrong tensor, at start-up."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

# A model that ties its head to the embedding may have this tensor in its file, too; it is not read.
HEAD = "lm_head.weight"
# Lists the file of each tensor of a large checkpoint.
INDEX = "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]


def verified(
    weights: Iterable[tuple[str, torch.Tensor]],
    expected: Shapes,
    architecture: str,
    one_name: Callable[[str], str | None] = lambda name: name,
    beside: re.Pattern[str] | None = None,
    whole: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, and raise unless they are the `expected` tensors.

    Args:
        weights: the tensors of a checkpoint by their names in its files.
        expected: the shapes of all tensors that the checkpoint must have, by name.
        architecture: the model's name for error messages.
        one_name: maps a tensor's name in the file to its name in `expected`, for tensors that may
            have several names; None drops a tensor that is not read.
        beside: tensors whose names match may exist in addition, and are passed on unchecked.
        whole: all expected tensors must come. False for an update of weights, which a trainer
            sends in parts.

    Raises:
        ValueError: a tensor does not belong to the architecture or has another shape, or, after
            all tensors have been passed on, some are missing.
    """
    missing = set(expected)
    for name, tensor in weights:
        if beside is not None and beside.search(name):
            yield name, tensor
            continue
        known = one_name(name)
        if known is None or (known == HEAD and HEAD not in expected):
            continue
        if known not in expected:
            close = difflib.get_close_matches(known, missing, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"not a {architecture} checkpoint: unexpected tensor {name!r}{hint}")
        if not _same(tuple(tensor.shape), expected[known]):
            raise ValueError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but config.json asks for "
                f"{expected[known]}"
            )
        missing.discard(known)
        yield name, tensor
    if whole and missing:
        names = sorted(missing)
        raise ValueError(
            f"the checkpoint lacks {len(names)} of {architecture}'s tensors: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        )


def _same(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether two shapes are equal; those of a single number count as equal, e.g. () and (1,)."""
    return actual == expected or (math.prod(actual) == math.prod(expected) == 1)


def name_damage(
    error: Exception,
    place: tuple[str | Path, str | None],
    files: Sequence[str],
    architectures: Sequence[str],
) -> None:
    """Raise an error that names a damaged file, if a damaged file may have caused `error`.

    Does nothing for a checkpoint of other architectures.

    Args:
        error: the error that loading the checkpoint has raised.
        place: the checkpoint's name and revision.
        files: glob patterns of the files to check.
        architectures: the architectures for which files are checked.

    Raises:
        ValueError: one of the files cannot be read; the message names it.
    """
    from vllm.transformers_utils.repo_utils import try_get_local_file

    config = try_get_local_file(place[0], "config.json", place[1])
    if not isinstance(config, Path) or _damage(config) is not None:
        return
    if not set(json.loads(config.read_text()).get("architectures") or ()) & set(architectures):
        return
    folder = config.parent
    for file in sorted(file for pattern in files for file in folder.glob(pattern)):
        problem = _damage(file)
        if problem is not None:
            raise ValueError(
                f"{file.name} in {folder} is damaged or incomplete ({problem}); fetch it again"
            ) from error


def _damage(file: Path) -> str | None:
    """Why a file cannot be read, or None; a safetensors file is also checked for its length."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return None
        content = json.loads(file.read_text())
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(content, dict):
        return "no JSON object"
    unmapped = file.name == INDEX and not isinstance(content.get("weight_map"), dict)
    return "no weight_map" if unmapped else None
