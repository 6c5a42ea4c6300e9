"""Verifies checkpoints at start-up: a wrong one is refused, naming its first wrong tensor."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

# A model that ties its head to the embedding may have this tensor in its file too; it is ignored.
HEAD = "lm_head.weight"
Shapes = Mapping[str, tuple[int, ...]]
FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
# vLLM's name of the method that quantizes a checkpoint while loading it (`--quantization fp8`).
ONLINE = "online"
# Scales of a quantized KV cache; vLLM knows several names for each and reads them itself.
KV_SCALES = re.compile(r"\.[qkv](_proj)?[._](output_)?(scale|zero_point)$")
# How many elements of a tensor are compared with those of a copy, beside the sum of all.
COMPARED = 1024

logger = init_logger("vllm.dllm")


class Stored(NamedTuple):
    """How a checkpoint stores a tensor.

    Attributes:
        shape: its shape.
        dtypes: the dtypes it may have.
        group: a description of the part of `quantization_config` that asks for it; "" for none.
    """

    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype] = FLOATS
    group: str = ""


def expected(
    plain: Shapes,
    quant_config: QuantizationConfig | None,
    is_linear: Callable[[str], bool],
    vllm_name: Callable[[str], str] = lambda name: name,
) -> dict[str, Stored] | None:
    """Every tensor of a checkpoint, quantized or not, by name.

    Args:
        plain: the tensors of an unquantized checkpoint, one matrix for each linear layer.
        quant_config: the checkpoint's quantization, or None.
        is_linear: whether a tensor's name is that of a layer that vLLM's class can quantize.
        vllm_name: maps a name in `plain` to vLLM's name, before projections are fused.

    Returns:
        How they are stored, or None for a method whose tensors are not known here.
    """
    if quant_config is None or quant_config.get_name() == ONLINE:
        return {name: Stored(shape) for name, shape in plain.items()}
    from vllm_dllm.checkpoints.quantized import quantized_tensors

    return quantized_tensors(plain, quant_config, is_linear, vllm_name)


def building(
    quant_config: QuantizationConfig | None, spellings: Mapping[str, Iterable[str]]
) -> AbstractContextManager[None]:
    """A context in which vLLM's class builds its layers, quantized as `quant_config` says.

    Args:
        quant_config: the checkpoint's quantization, or None.
        spellings: for vLLM's name of each layer that can be quantized (projections not fused) its
            names in checkpoints.

    Raises:
        ValueError: layers that vLLM fuses have different schemes, or a layer could not be built,
            for example because its scheme has no kernel.
    """
    if quant_config is None:
        return nullcontext()
    from vllm_dllm.checkpoints.quantized import choose_as_written, naming_the_scheme

    choose_as_written(quant_config, spellings)
    return naming_the_scheme(quant_config)


def linear_layers(plain: Shapes, is_linear: Callable[[str], bool]) -> dict[str, list[str]]:
    """The layers that can be quantized, for `building`, if vLLM renames none."""
    modules = (name.removesuffix(".weight") for name in plain if is_linear(name))
    return {module: [module] for module in modules}


def verified(
    weights: Iterable[tuple[str, torch.Tensor]],
    expected: Mapping[str, Stored],
    architecture: str,
    one_name: Callable[[str], str | None] = lambda name: name,
    beside: re.Pattern[str] | None = None,
    whole: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, and raise unless they are the `expected` tensors.

    Args:
        weights: the tensors of a checkpoint by their names in its files.
        expected: all tensors that the checkpoint must have, by name.
        architecture: the model's name for error messages.
        one_name: maps a tensor's name in the file to its name in `expected`, for tensors that may
            have several names; None drops a tensor that is not read.
        beside: tensors whose names match may exist in addition, and are passed on unchecked.
        whole: whether all expected tensors must come. False for an update of weights, which a
            trainer sends in parts.

    Raises:
        ValueError: a tensor does not belong to the architecture, has another shape or dtype, or
            differs from its copy; or, after all tensors have been passed on, some are missing.
    """
    missing, passed_over = set(expected), list[str]()
    came: dict[str, tuple[str, torch.Tensor]] = {}  # names in the file, and fingerprints
    for name, tensor in weights:
        if beside is not None and beside.search(name):
            yield name, tensor
            continue
        known = one_name(name)
        if known is None or (known == HEAD and HEAD not in expected):
            continue
        if known not in expected:
            from vllm_dllm.checkpoints.quantized import has_no_effect

            if not has_no_effect(name, known, tensor, expected):
                raise _unexpected(name, known, tensor, expected, missing, architecture)
            passed_over.append(name)
            continue
        _check(name, known, tensor, expected)
        if whole:
            _check_copy(came.setdefault(known, (name, _fingerprint(tensor))), name, tensor)
        missing.discard(known)
        yield name, tensor
    if whole and missing:
        names = sorted(missing)
        raise ValueError(
            f"the checkpoint lacks {len(names)} of {architecture}'s tensors: {_first(names)}"
        )
    if passed_over:
        logger.warning(
            "dllm: %d tensors of the checkpoint have no effect: %s",
            len(passed_over),
            _first(passed_over),
        )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """What a copy must have in common with a tensor, uint8; the tensor itself is not kept.

    The sum of all bits in words of 64 bits, which any one element changes, and up to twice
    `COMPARED` elements from everywhere, which rows in another order change.
    """
    flat = tensor.flatten()
    some = flat[:: max(1, len(flat) // COMPARED)].clone().view(torch.uint8)
    data = flat.view(torch.uint8)
    if data.storage_offset() % 8:  # a view of wider words must begin at one
        data = data.clone()
    words = len(data) // 8 * 8
    total = data[:words].view(torch.int64).sum() + data[words:].sum()
    return torch.cat([total.view(1).view(torch.uint8), some])


def _check_copy(first: tuple[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError for a tensor that differs from one that came before in its place."""
    if not torch.equal(first[1], _fingerprint(tensor)):
        which = f"tensors {first[0]!r} and {name!r}" if first[0] != name else f"tensor {name!r}"
        raise ValueError(
            f"{which}: the checkpoint has two copies of a tensor, and they differ; remove the "
            "wrong one, or make them equal"
        )


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _check(name: str, known: str, tensor: torch.Tensor, expected: Mapping[str, Stored]) -> None:
    """Raise a ValueError for a tensor that has the wrong shape or dtype."""
    shape, dtypes, group = expected[known]
    if tensor.dtype not in dtypes:
        from vllm_dllm.checkpoints.quantized import refuse_left_out

        refuse_left_out(name, known, tensor, expected)
        found, right = word(tensor.dtype), " or ".join(sorted(word(dtype) for dtype in dtypes))
        raise ValueError(
            f"tensor {name!r} is stored as {found}, but {group} stores {right}; correct the "
            "`targets` of its groups, or quantize the checkpoint again"
            if group
            else f"tensor {name!r} is stored as {found}, and no group of a quantization_config in "
            f"config.json has its layer, so that it should be {right}; add the layer to a group"
        )
    if not _same(tuple(tensor.shape), shape):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, but config.json asks for {shape}"
        )


def word(dtype: torch.dtype) -> str:
    """A dtype's name without the library prefix."""
    return str(dtype).removeprefix("torch.")


def _unexpected(
    name: str,
    known: str,
    tensor: torch.Tensor,
    expected: Mapping[str, Stored],
    missing: Collection[str],
    architecture: str,
) -> ValueError:
    """Build the error for a tensor that does not belong to the model."""
    from vllm_dllm.checkpoints.quantized import refuse_left_out

    refuse_left_out(name, known, tensor, expected)
    close = difflib.get_close_matches(known, missing, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"not a {architecture} checkpoint: unexpected tensor {name!r}{hint}")


def _same(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether two shapes are equal; those of a single number count as equal, e.g. () and (1,)."""
    return actual == expected or (math.prod(actual) == math.prod(expected) == 1)
