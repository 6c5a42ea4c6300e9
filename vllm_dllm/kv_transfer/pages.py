"""Keep each page of keys and values in a file of its own.

A page's address covers exactly what its keys and values depend on. Its file is written whole or not
at all and checked when read: a safetensors file with a tensor for each attention layer, the
address, and a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from safetensors import safe_open
from safetensors.torch import save
from vllm.transformers_utils.repo_utils import try_get_local_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# The version of the format of files and addresses. A new version makes new folders.
FORM = "1"
# Where a tensor is sampled, as fractions of its length, and how many bytes at each place.
SPOTS, SPOT_BYTES = (0.0, 0.33, 0.66, 1.0), 512


def fingerprint(vllm_config: VllmConfig) -> str:
    """A digest of the model, the block length, the window and the types of numbers.

    Raises:
        ValueError: the checkpoint has no files that distinguish its weights from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    served = model.dllm
    stated = {
        "form": FORM,
        "vllm": vllm.__version__,
        # The config is read as written, because vLLM's processes hold different fields of it. The
        # options change what it says about the model.
        "config": json.loads(_config_file(model, model.hf_config_path or model.model).read_text()),
        "overrides": model.hf_overrides,
        "whole context": model.disable_sliding_window,
        "weights": weights_digest(_config_file(model, model.model).parent),
        "quantization": str(model.quantization),
        "dtype": [str(model.dtype), str(cache.cache_dtype)],
        "block length": served.length,
        "window": served.settings.window,
        "page": cache.block_size,
    }
    text = json.dumps(stated, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def page_addresses(
    fingerprint: str, salt: str | None, tokens: Sequence[int], page: int
) -> list[str]:
    """The address of each whole page: a digest of it, of all pages before, server and salt."""
    parent = hashlib.sha256(f"{fingerprint} {salt!r}".encode()).digest()
    found = []
    for end in range(page, len(tokens) + 1, page):
        ids = np.asarray(tokens[end - page : end], dtype="<i8")
        parent = hashlib.sha256(parent + ids.tobytes()).digest()
        found.append(parent.hex())
    return found


_NO_WEIGHTS = (
    "--kv-transfer-config: {model} has no *.safetensors files on this machine by which saved keys "
    "and values could be told from those of other weights; remove it, or serve a folder with them"
)


def _config_file(model: ModelConfig, place: str) -> Path:
    """The ``config.json`` of a model, which is loaded already."""
    found = try_get_local_file(place, "config.json", model.revision)
    if not isinstance(found, Path | str):
        raise ValueError(_NO_WEIGHTS.format(model=place))
    return Path(found)


def weights_digest(folder: Path) -> str:
    """A digest of the names, shapes and types of all tensors, and of samples of each.

    Reading whole files would take minutes, and modification times differ between machines.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(_NO_WEIGHTS.format(model=folder))
    found = hashlib.sha256()
    for file in files:
        found.update(file.name.encode())
        for piece in _samples(file):
            found.update(piece)
    return found.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and some bytes of each tensor."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = opened.read(size)
        yield header
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for tensor in tensors.values():
            start, end = tensor["data_offsets"]
            for spot in SPOTS:
                opened.seek(8 + size + start + int(spot * max(0, end - start - SPOT_BYTES)))
                yield opened.read(min(SPOT_BYTES, end - start))


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
