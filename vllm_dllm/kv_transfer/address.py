"""Compute the address of a page, which covers exactly what its keys and values depend on.

An address is a digest of the server (`fingerprint`), of the tokens of the page and of all tokens
before it, and of the request's ``cache_salt``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import vllm
from vllm.transformers_utils.repo_utils import try_get_local_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# The version of the format of files and addresses. A new version makes new folders.
FORM = "1"
# Where a tensor is sampled, as fractions of its length, and how many bytes at each place. If
# training changes a tensor at all, it changes every number in it.
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
    """The address of each whole page of a prompt, a digest that includes all pages before it."""
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

    Reading whole files would take minutes, and modification times would differ between two machines
    that have the same checkpoint.

    Raises:
        ValueError: the folder has no safetensors files.
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
