"""Keep each page of keys and values in a file, written whole or not at all and checked when read.

A file is in the safetensors format. It has a tensor for each attention layer, the page's address
and a digest of the tensors, so that a damaged or misplaced file is recognized.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save


class PageError(Exception):
    """A file does not hold the page that it should hold; the message says why."""


def page_of(caches: Mapping[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """A page of each layer, on the CPU; `caches` are ``[pages, ...]`` by layer."""
    return {name: cache[block].detach().cpu().contiguous() for name, cache in caches.items()}


def save_page(file: Path, address: str, page: Mapping[str, torch.Tensor]) -> None:
    """Write a page; readers see either no file or the whole of it.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.unfinished")
    try:
        # Not `save_file`, whose errors are not those of files.
        unfinished.write_bytes(save(dict(page), {"address": address, "digest": digest(page)}))
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def load_page(
    file: Path, address: str, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read a page with the names, shapes and types of `like`, a page of each layer.

    Raises:
        PageError: the file is missing, truncated or changed, or belongs to another page.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            stated = opened.metadata() or {}
            page = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own exceptions, too
        raise PageError(f"it cannot be read: {error}") from error
    if stated.get("address") != address:
        raise PageError("it holds another page")
    if _kinds(page) != _kinds(like):
        raise PageError("its layers are not those of the model")
    if stated.get("digest") != digest(page):
        raise PageError("its content has changed")
    return page


def digest(page: Mapping[str, torch.Tensor]) -> str:
    """A digest of the tensors and of the layers that they belong to."""
    found = hashlib.blake2b(digest_size=32)
    for name in sorted(page):
        found.update(name.encode() + b"\0")
        content: Any = page[name].contiguous().view(torch.uint8).numpy()
        found.update(content)
    return found.hexdigest()


def is_finite(page: Mapping[str, torch.Tensor]) -> bool:
    """Whether a page is free of NaN, which would corrupt every request that loads it."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in page.values())


def _kinds(page: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in page.items()}
