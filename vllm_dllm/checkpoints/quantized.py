"""Quantized checkpoints: what vLLM's layers load for each matrix, and what of a file is refused.

A linear layer without memory is built for each matrix, so that its tensors are those that vLLM will
read, by name, shape and dtype, whatever the method.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.config_utils import is_equal_or_regex_match
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dllm.checkpoints.stored import FLOATS, Shapes, Stored, one_by_one

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

COMPRESSED = "compressed-tensors"
# Tensors that no layer reads: observed ranges, and tables that are computed again.
WITHOUT_EFFECT = re.compile(
    r"[._](input|output)_(min|max)$|_quantizer\._amax$|\.rotary_emb\.inv_freq$"
)
# Tensors that would change a layer's output but that vLLM does not read.
UNREAD = {
    "weight_g_idx": "quantize the checkpoint again without `actorder`, or with 'static'",
    "pre_quant_scale": "export the checkpoint with the scale folded into the layer before",
    "smooth_scale": "export the checkpoint with the scale folded into the layer before",
}
# What a layer calls its matrix.
MATRICES = ("weight", "weight_packed", "qweight")
# Single numbers, which files may store in another integer type than layers.
NUMBERS = ("weight_shape", "input_zero_point")
# The attributes of vLLM's configurations that list layers, and whether these are quantized.
LISTS = {
    "exclude_modules": False,
    "modules_to_not_convert": False,
    "modules_in_block_to_quantize": True,
}
_LATER_EXPERT = re.compile(r"\.experts\.(?!0\.)\d+\.")


def quantized_tensors(
    plain: Shapes,
    quant_config: QuantizationConfig,
    is_linear: Callable[[str], bool],
    vllm_name: Callable[[str], str] = lambda name: name,
) -> dict[str, Stored]:
    """Every tensor of a quantized checkpoint, given those of one that is not.

    Experts are quantized one by one. See `VerifiedWeights` for the functions.
    """

    @functools.cache
    def parts(module: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        return _parts_of(module, shape, quant_config)

    def chosen(experts: str) -> bool:
        return is_quantized(quant_config, f"{vllm_name(experts)}.0.gate_proj")

    tensors: dict[str, Stored] = {}
    for name, shape in one_by_one(plain, chosen).items():
        module = name.removesuffix(".weight")
        found = {"weight": Stored(shape)} if module != name else None
        if is_linear(name):
            # A layer's experts are all alike.
            first = re.sub(r"\.experts\.\d+\.", ".experts.0.", vllm_name(name))
            found = parts(first.removesuffix(".weight"), tuple(shape))
        if found is None:
            tensors[name] = Stored(shape)
        else:
            tensors |= {f"{module}.{part}": one for part, one in found.items()}
    return tensors


def is_quantized(quant_config: QuantizationConfig, module: str) -> bool:
    """Whether vLLM quantizes a linear layer, by its name there, its projections not fused."""
    method = quant_config.get_quant_method(_layer((64, 64), None), module)
    return not isinstance(method, UnquantizedLinearMethod)


def _parts_of(
    module: str, shape: tuple[int, ...], quant_config: QuantizationConfig
) -> dict[str, Stored]:
    """The tensors of a matrix ``[out, in]`` in a checkpoint, by last part of name."""
    if not is_quantized(quant_config, module):
        return {"weight": Stored(shape)}
    known = True
    try:
        layer = _layer(shape, quant_config, module)
    except ValueError:
        if ".experts." not in module:
            raise
        # Experts have kernels of their own, which take other widths than those of linear layers.
        layer, known = _layer((1024, 1024), quant_config, module), False
    # ModelOpt's method for weights alone drops the scale of its inputs, which older files have.
    spec = getattr(layer.quant_method, "spec", None)
    unread = {*UNREAD, "input_scale"} if spec and spec.activation is None else UNREAD
    return {
        name: Stored(
            tuple(parameter.shape) if known else None, _dtypes(name, parameter.dtype), True
        )
        for name, parameter in layer.named_parameters()
        if name not in unread
    }


def _layer(
    shape: tuple[int, ...], quant_config: QuantizationConfig | None, module: str = ""
) -> ReplicatedLinear:
    out, size = shape
    model = get_current_vllm_config().model_config
    with torch.device("meta"):
        return ReplicatedLinear(
            size,
            out,
            bias=False,
            params_dtype=None if model is None else model.dtype,
            quant_config=quant_config,
            prefix=module,
            disable_tp=True,
        )


def _dtypes(name: str, loaded: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes in a file; vLLM converts numbers of 16 bits and more when it loads them."""
    if name in NUMBERS:
        return frozenset({torch.int8, torch.int32, torch.int64})
    return FLOATS if loaded in FLOATS else frozenset({loaded})


class Linear(torch.nn.Module):
    """Stands in for any linear layer where vLLM asks for a layer's class name."""


def scheme_of(quant_config: Any, module: str) -> dict[str, Any] | None:
    """The scheme of a linear layer of compressed-tensors; None if it is not quantized."""
    return quant_config.get_scheme_dict(Linear(), module)


def choose_as_written(
    quant_config: QuantizationConfig, spellings: Mapping[str, Iterable[str]]
) -> None:
    """Make vLLM quantize the layers that a checkpoint's tool has quantized, and in the same way.

    vLLM translates the names that a ``quantization_config`` lists, but not its patterns, which
    match a checkpoint's names. If several targets match a layer, the library compressed-tensors
    prefers names to patterns, both in alphabetical order, while vLLM uses the first in the file;
    and it matches layers that it fuses by the fused layer's name. Raises ValueError if layers that
    vLLM fuses have different schemes.
    """
    if quant_config.get_name() == COMPRESSED:
        _choose_targets(quant_config, spellings)
    else:
        _choose_listed(quant_config, spellings)


def _choose_targets(config: Any, spellings: Mapping[str, Iterable[str]]) -> None:
    ignored, targets = config.ignore, dict(config.target_scheme_map)
    in_order = sorted(targets, key=lambda target: (target.startswith("re:"), target))

    def scheme(names: Sequence[str]) -> dict[str, Any] | None:
        if any(is_equal_or_regex_match(name, entry) for entry in ignored for name in names):
            return None
        found = (e for e in in_order if any(is_equal_or_regex_match(name, e) for name in names))
        target = next(found, None)
        return scheme_of(config, names[0]) if target is None else targets[target]

    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    for own, names in spellings.items():
        layers[_layer_of(own, config.packed_modules_mapping)][own] = scheme([own, *names])
    exact = {}
    for layer, parts in layers.items():
        (first, chosen), *others = parts.items()
        for own, other in others:
            if other is not chosen and other != chosen:
                raise ValueError(
                    f"{first} and {own} are one layer in vLLM, and quantization_config has "
                    "different schemes for them; quantize both in the same way"
                )
        for name in (layer, *parts):
            if chosen is not None:
                exact[name] = chosen
            elif name not in ignored:
                ignored.append(name)
    config.target_scheme_map.clear()
    config.target_scheme_map.update(
        {name: it for name, it in exact.items() if not _LATER_EXPERT.search(name)} | targets
    )


def _layer_of(name: str, packed: Mapping[str, Sequence[str]]) -> str:
    """The name of the fused layer that vLLM builds from a layer and others."""
    before, is_expert, _ = name.partition(".experts.")
    if is_expert:
        return f"{before}.experts"
    prefix, _, last = name.rpartition(".")
    return f"{prefix}.{next((whole for whole, parts in packed.items() if last in parts), last)}"


def _choose_listed(
    quant_config: QuantizationConfig, spellings: Mapping[str, Iterable[str]]
) -> None:
    """`choose_as_written` for methods that list the layers which a scheme leaves out."""
    listed = next((name for name in LISTS if getattr(quant_config, name, None)), None)
    if listed is None or getattr(quant_config, "quantized_layers", None):
        return  # ModelOpt's mixed schemes name each layer
    entries: list[str] = getattr(quant_config, listed)
    if listed not in getattr(quant_config, "full_config", {listed}):
        # vLLM has listed the owners of all tensors that are not quantized, and looks for them in
        # the names of layers: a scale of a whole decoder layer would leave out everything in it.
        owners = {own[:dot] for own in spellings for dot in range(len(own)) if own[dot] == "."}
        entries[:] = [name for name in entries if name not in owners]
    wanted = LISTS[listed]
    added = [
        own
        for own, names in spellings.items()
        if not _LATER_EXPERT.search(own)
        and is_quantized(quant_config, own) != wanted
        and any(is_quantized(quant_config, name) == wanted for name in names)
    ]
    entries.extend(added)


def keep_plain_head(head: Any) -> None:
    """Give a head that is not quantized the method of an unquantized model's.

    Some methods give it that of linear layers, which on a CPU drops the matrix once it is packed.
    """
    if isinstance(getattr(head, "quant_method", None), UnquantizedLinearMethod):
        head.quant_method = UnquantizedEmbeddingMethod()


def refuse_dtype(
    name: str, known: str, tensor: torch.Tensor, expected: Mapping[str, Stored]
) -> None:
    """Raise a ValueError for a tensor that has another dtype than `expected`."""
    refuse_left_out(name, known, tensor, expected)
    _, dtypes, quantized = expected[known]
    found, right = word(tensor.dtype), " or ".join(sorted(word(dtype) for dtype in dtypes))
    raise ValueError(
        f"tensor {name!r} is stored as {found}, but by quantization_config as {right}; correct "
        "that, or quantize the checkpoint again"
        if quantized
        else f"tensor {name!r} is stored as {found}, and quantization_config in config.json does "
        f"not have its layer, so that it should be {right}; add the layer there"
    )


def word(dtype: torch.dtype) -> str:
    """A dtype's name without the library prefix."""
    return str(dtype).removeprefix("torch.")


def refuse_left_out(
    name: str, known: str, tensor: torch.Tensor, expected: Mapping[str, Stored]
) -> None:
    """Raise a ValueError for a matrix that was not quantized although its layer should be.

    For example, tools skip experts that are stored in one tensor. A quantized head is refused.
    """
    head, _, part = known.partition(".")
    is_head = head == "lm_head" or (head.endswith("_head") and f"{head}.weight" in expected)
    if is_head and part.isidentifier() and part != "bias":
        raise ValueError(
            f"tensor {name!r}: a quantized {head} is not supported; quantize the checkpoint again "
            f"with {head!r} in `ignore`"
        )
    module = known.removesuffix(".weight")
    layer, is_expert, _ = module.partition(".experts.")
    if is_expert:
        module = f"{layer}.experts.0.gate_proj"
    parts = (expected.get(f"{module}.{part}") for part in MATRICES)
    quantized = any(part is not None and part.quantized for part in parts)
    if quantized and tensor.ndim > 1 and tensor.dtype in FLOATS:
        entry = f"{layer}.experts" if is_expert else name.removesuffix(".weight")
        raise ValueError(
            f"tensor {name!r} is stored as {word(tensor.dtype)} and not quantized; leave {entry!r} "
            "out of quantization_config (`ignore` in config.json, which takes patterns)"
        )


def check_unexpected(
    name: str,
    known: str,
    tensor: torch.Tensor,
    expected: Mapping[str, Stored],
    missing: Collection[str],
    architecture: str,
) -> None:
    """Raise a ValueError for a tensor that is not `expected`, unless no layer would need it.

    `known` is its name from `VerifiedWeights.one_name`, and `missing` what has not come yet.
    """
    module, _, part = known.rpartition(".")
    if part in UNREAD:
        raise ValueError(f"tensor {name!r} is not read by vLLM; {UNREAD[part]}")
    if part == "g_idx" and f"{module}.scales" in expected:
        groups = (expected[f"{module}.scales"].shape or (1,))[0]
        if torch.equal(tensor.long(), torch.arange(len(tensor)) * groups // len(tensor)):
            return
        raise ValueError(
            f"tensor {name!r} puts inputs into groups in another order than their own, which vLLM "
            "does not read; quantize the checkpoint again with `desc_act: false`"
        )
    if f"{module}.weight_scale" in expected:
        if part == "weight_zero_point" and tensor.any():
            raise ValueError(
                f"tensor {name!r} is not zero, but the scheme is symmetric; write "
                "`symmetric: false`, or quantize the checkpoint again"
            )
        # Activations are quantized dynamically, or not at all.
        if part in ("weight_zero_point", "input_scale", "input_zero_point"):
            return
    if WITHOUT_EFFECT.search(known):
        return
    refuse_left_out(name, known, tensor, expected)
    close = difflib.get_close_matches(known, missing, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"not a {architecture} checkpoint: unexpected tensor {name!r}{hint}")
