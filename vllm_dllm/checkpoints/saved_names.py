"""Names of tensors as fine-tuning leaves them in a file, and a resized vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

# Put into names by PEFT (which leaves ``base_layer`` where an adapter was merged in place),
# torch.compile, DistributedDataParallel and FSDP.
_WRAPPERS = re.compile(
    r"(?<![^.])(base_model\.model|base_layer|_orig_mod|module|_fsdp_wrapped_module)\."
)
_VOCABULARY = ("lm_head.weight", "embed_tokens.weight", "word_embeddings.weight")


def unwrapped(name: str, is_expected: Callable[[str], bool]) -> str:
    """The name in the model of a tensor in a file, else `name`; raises ValueError for adapters'."""
    if ".lora_" in name:
        raise ValueError(
            f"tensor {name!r} is an adapter's, and the file does not say whether the weights hold "
            "it; save the model after merge_and_unload(), or serve the adapter with --enable-lora"
        )
    plain = _WRAPPERS.sub("", name)
    candidates = (plain, plain.removeprefix("model."), f"model.{plain}")
    return next((candidate for candidate in candidates if is_expected(candidate)), name)


def refuse_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise a ValueError for a tensor that has another shape than `shape`."""
    remedy = ""
    if name.endswith(_VOCABULARY) and tensor.shape[1:] == shape[1:]:
        rows = len(tensor)
        remedy = (
            f"; if the vocabulary was resized, state vocab_size={rows} there or in --hf-overrides"
        )
    raise ValueError(
        f"tensor {name!r} has shape {tuple(tensor.shape)}, but config.json asks for {shape}{remedy}"
    )
