"""Quantized checkpoints: the names, shapes and schemes that a `quantization_config` implies.

This module is loaded for a checkpoint that is quantized, or that has a tensor which an unquantized
one does not have.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.checkpoints.authors_tensors import one_by_one
from vllm_dllm.checkpoints.verify import FLOATS, Shapes, Stored

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

COMPRESSED = "compressed-tensors"
# Tensors that tools leave in a checkpoint but no layer reads: observed ranges, and tables that are
# computed again.
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


class Linear(torch.nn.Module):
    """Stands in for any linear layer where vLLM asks for a layer's class name."""


def scheme_of(quant_config: Any, module: str) -> dict[str, Any] | None:
    """The scheme of a linear layer in a compressed-tensors checkpoint, by vLLM's matching.

    Args:
        quant_config: vLLM's compressed-tensors configuration, with the model's names mapped.
        module: the layer's name in vLLM, its projections not fused.

    Returns:
        `weights`, `input_activations` (`QuantizationArgs` or None) and `format`, or None for a
        layer that is not quantized.
    """
    return quant_config.get_scheme_dict(Linear(), module)


def quantized_tensors(
    plain: Shapes,
    quant_config: QuantizationConfig,
    is_linear: Callable[[str], bool],
    vllm_name: Callable[[str], str] = lambda name: name,
) -> dict[str, Stored] | None:
    """Every tensor of a quantized checkpoint, by name; experts are quantized one by one.

    Args:
        plain: the tensors of an unquantized checkpoint.
        quant_config: the checkpoint's quantization.
        is_linear: see `VerifiedWeights`.
        vllm_name: see `VerifiedWeights`.

    Returns:
        How they are stored, or None for a layout whose tensors are not known here.
    """
    if quant_config.get_name() != COMPRESSED:
        return _of_vllm_layers(plain, quant_config, is_linear, vllm_name)

    def is_quantized(experts: str) -> bool:
        return scheme_of(quant_config, f"{vllm_name(experts)}.0.gate_proj") is not None

    tensors: dict[str, Stored] = {}
    groups: dict[int, str] = {}
    for name, shape in one_by_one(plain, is_quantized).items():
        module = name.removesuffix(".weight")
        scheme = None
        if is_linear(name):
            scheme = scheme_of(quant_config, vllm_name(name).removesuffix(".weight"))
        if scheme is None:
            tensors[name] = Stored(shape)
            continue
        if id(scheme) not in groups:
            groups[id(scheme)] = group_of(quant_config, scheme)
        stored = stored_as(shape, scheme, groups[id(scheme)])
        if stored is None:
            return None
        tensors |= {f"{module}.{part}": one for part, one in stored.items()}
    return tensors


def _of_vllm_layers(
    plain: Shapes,
    quant_config: QuantizationConfig,
    is_linear: Callable[[str], bool],
    vllm_name: Callable[[str], str],
) -> dict[str, Stored]:
    """The tensors of methods other than compressed-tensors; a layer's experts are all alike."""
    from vllm_dllm.checkpoints.vllm_layers import parts_of

    @functools.cache
    def parts(module: str, shape: tuple[int, ...]) -> dict[str, Stored] | None:
        return parts_of(module, shape, quant_config)

    def is_quantized(experts: str) -> bool:
        return parts(f"{vllm_name(experts)}.0.gate_proj", (64, 64)) is not None

    tensors: dict[str, Stored] = {}
    for name, shape in one_by_one(plain, is_quantized).items():
        module, found = name.removesuffix(".weight"), None
        if is_linear(name):
            first = re.sub(r"\.experts\.\d+\.", ".experts.0.", vllm_name(name))
            found = parts(first.removesuffix(".weight"), shape)
        if found is None:
            tensors[name] = Stored(shape)
        else:
            tensors |= {f"{module}.{part}": one for part, one in found.items()}
    return tensors


def stored_as(
    shape: tuple[int, ...], scheme: Mapping[str, Any], group: str = ""
) -> dict[str, Stored] | None:
    """The tensors that replace a matrix ``[out, in]`` in a checkpoint, by last part of name.

    The layouts are those of the library compressed-tensors; None for one that is not known here.
    """
    out, size = shape
    weights, inputs = scheme["weights"], scheme["input_activations"]
    strategy, length = word_of(weights.strategy), weights.group_size
    groups = -(-size // length) if length and length > 0 else 1
    scales = {
        "tensor": (1,),
        "channel": (out, 1),
        "group": (out, groups),
        "tensor_group": (out, groups),
    }
    if strategy == "block":
        rows, columns = weights.block_structure
        scale: tuple[int, ...] = (-(-out // rows), -(-size // columns))
    else:
        scale = scales[strategy]
    layout = scheme["format"]
    parts: dict[str, tuple[tuple[int, ...], Collection[torch.dtype]]]
    if layout in ("float-quantized", "int-quantized", "naive-quantized"):
        parts = {"weight": (shape, [weights.pytorch_dtype()]), "weight_scale": (scale, FLOATS)}
        if not weights.symmetric:
            parts["weight_zero_point"] = (scale, [weights.zp_dtype, torch.int8])
        if inputs is not None and not inputs.dynamic:
            parts["input_scale"] = ((1,), FLOATS)
            if not inputs.symmetric:
                parts["input_zero_point"] = ((1,), [inputs.zp_dtype, torch.int8])
    elif layout == "pack-quantized" and inputs is None:
        in_word = 32 // weights.num_bits
        parts = {
            "weight_packed": ((out, -(-size // in_word)), [torch.int32]),
            "weight_scale": (scale, FLOATS),
            "weight_shape": ((2,), [torch.int32, torch.int64]),
        }
        if not weights.symmetric:
            parts["weight_zero_point"] = ((-(-out // in_word), scale[1]), [torch.int32])
    elif layout == "nvfp4-pack-quantized":
        parts = {
            "weight_packed": ((out, size // 2), [torch.uint8]),
            "weight_scale": (scale, [weights.scale_dtype or torch.float8_e4m3fn]),
            "weight_global_scale": ((1,), FLOATS),
        }
        if inputs is not None:
            parts["input_global_scale"] = ((1,), FLOATS)
    else:
        return None
    return {part: Stored(one, frozenset(dtypes), group) for part, (one, dtypes) in parts.items()}


def refuse_dtype(
    name: str, known: str, tensor: torch.Tensor, expected: Mapping[str, Stored]
) -> None:
    """Raise a ValueError for a tensor that has another dtype than `expected`."""
    refuse_left_out(name, known, tensor, expected)
    _, dtypes, group = expected[known]
    found, right = word(tensor.dtype), " or ".join(sorted(word(dtype) for dtype in dtypes))
    raise ValueError(
        f"tensor {name!r} is stored as {found}, but {group} stores {right}; correct "
        "quantization_config, or quantize the checkpoint again"
        if group
        else f"tensor {name!r} is stored as {found}, and no group of a quantization_config in "
        f"config.json has its layer, so that it should be {right}; add the layer to a group, or "
        "remove it from what is left out"
    )


def word(dtype: torch.dtype) -> str:
    """A dtype's name without the library prefix."""
    return str(dtype).removeprefix("torch.")


def refuse_left_out(
    name: str, known: str, tensor: torch.Tensor, expected: Mapping[str, Stored]
) -> None:
    """Raise a ValueError for a matrix that was not quantized although a group covers its layer.

    For example, tools skip experts that are stored together in one tensor. The head is the other
    way round: it is read as it is, whatever group covers it.
    """
    head, _, part = known.partition(".")
    is_head = head == "lm_head" or (head.endswith("_head") and f"{head}.weight" in expected)
    if is_head and part.isidentifier() and part != "bias":
        raise ValueError(
            f"tensor {name!r}: a quantized {head} is not supported; quantize the checkpoint again "
            f"with {head!r} in `ignore`"
        )
    module, entry = known.removesuffix(".weight"), name.removesuffix(".weight")
    layer, is_expert, _ = module.partition(".experts.")
    if is_expert:
        module, entry = f"{layer}.experts.0.gate_proj", r"re:.*\.experts\..*"
    parts = (expected.get(f"{module}.{part}") for part in MATRICES)
    group = next((part.group for part in parts if part is not None), "")
    if is_expert and group.startswith("quantization_config"):
        entry = f"{layer}.experts*"
    if group and tensor.ndim > 1 and tensor.dtype in FLOATS:
        raise ValueError(
            f"tensor {name!r} is stored as {word(tensor.dtype)} and not quantized, but {group} has "
            f"its layer; add {entry!r} to `ignore` of quantization_config in config.json"
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

    Args:
        name: the tensor's name in the file.
        known: the name from `VerifiedWeights.one_name`.
        tensor: the tensor.
        expected: all tensors that the checkpoint must have, by name.
        missing: those that have not come yet.
        architecture: the model's name.
    """
    module, _, part = known.rpartition(".")
    if part in UNREAD:
        raise ValueError(f"tensor {name!r} is not read by vLLM; {UNREAD[part]}")
    if part == "g_idx" and f"{module}.scales" in expected:
        groups = expected[f"{module}.scales"].shape[0]
        if torch.equal(tensor.long(), torch.arange(len(tensor)) * groups // len(tensor)):
            return
        raise ValueError(
            f"tensor {name!r} puts inputs into groups in another order than their own, which vLLM "
            "does not read; quantize the checkpoint again with `desc_act: false`"
        )
    if f"{module}.weight_scale" in expected:
        if part == "weight_zero_point" and tensor.any():
            raise ValueError(
                f"tensor {name!r} is not zero, but {expected[f'{module}.weight_scale'].group} is "
                "symmetric; write `symmetric: false`, or quantize the checkpoint again"
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


def group_of(quant_config: Any, scheme: Mapping[str, Any]) -> str:
    """Describe the first group of `quantization_config` that has a scheme."""
    weights, inputs = scheme["weights"], scheme["input_activations"]
    for name, group in quant_config.config["config_groups"].items():
        stated = group.get("input_activations")
        if type(weights).model_validate(group["weights"]) == weights and (
            (inputs is None and not stated)
            or (inputs is not None and stated and type(inputs).model_validate(stated) == inputs)
        ):
            return f"group {name!r} of quantization_config ({in_words(weights, inputs)})"
    return f"a group of quantization_config ({in_words(weights, inputs)})"


def choose_as_written(
    quant_config: QuantizationConfig, spellings: Mapping[str, Iterable[str]]
) -> None:
    """Make vLLM choose the same scheme for each layer as the library compressed-tensors.

    If several targets match a layer, the library prefers names to patterns, both in alphabetical
    order, while vLLM uses the first in the file. vLLM translates the names that a
    `quantization_config` lists, but not its patterns, which match a checkpoint's names. It also
    matches layers that it fuses by the fused layer's name.

    Args:
        quant_config: changed in place; for methods other than compressed-tensors see
            `choose_as_listed`.
        spellings: for vLLM's name of each layer (projections not fused) its names in checkpoints.

    Raises:
        ValueError: layers that vLLM fuses have different schemes.
    """
    if quant_config.get_name() != COMPRESSED:
        from vllm_dllm.checkpoints.vllm_layers import choose_as_listed

        choose_as_listed(quant_config, spellings)
        return
    config: Any = quant_config
    ignored, targets = config.ignore, config.target_scheme_map
    in_order = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    own_names = {}
    one_layer: dict[str, dict[str, Any]] = defaultdict(dict)
    for own, names in spellings.items():
        names = tuple(names)
        if not any(_matches(entry, own) for entry in ignored) and any(
            _matches(entry, name) for entry in ignored for name in names
        ):
            ignored.append(own)
        chosen = next((e for e in in_order if any(_matches(e, name) for name in names)), None)
        if chosen != next((e for e in in_order if _matches(e, own)), None) and chosen is not None:
            own_names[own] = targets[chosen]
    schemes = own_names | {entry: targets[entry] for entry in in_order}
    targets.clear()
    targets.update(schemes)
    for own in spellings:
        one_layer[_layer_of(own, config.packed_modules_mapping)][own] = scheme_of(config, own)
    fused = {}
    for layer, parts in one_layer.items():
        (first, scheme), *others = parts.items()
        for own, other in others:
            if other is not scheme and other != scheme:
                raise ValueError(
                    f"{first} and {own} are one layer in vLLM, and quantization_config has "
                    f"{_group_or_none(config, scheme)} for one and "
                    f"{_group_or_none(config, other)} for the other; quantize both in the same way"
                )
        is_fused = others and not layer.endswith(".experts")
        if is_fused and scheme is not None and scheme_of(config, layer) != scheme:
            fused[layer] = scheme
    schemes = fused | targets
    targets.clear()
    targets.update(schemes)


def _layer_of(name: str, packed: Mapping[str, Sequence[str]]) -> str:
    """The name of the fused layer that vLLM builds from a layer and others."""
    before, is_expert, _ = name.partition(".experts.")
    if is_expert:
        return f"{before}.experts"
    prefix, _, last = name.rpartition(".")
    return f"{prefix}.{next((whole for whole, parts in packed.items() if last in parts), last)}"


def _group_or_none(quant_config: Any, scheme: Mapping[str, Any] | None) -> str:
    return "no group" if scheme is None else group_of(quant_config, scheme)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry == name


def word_of(value: Any) -> str:
    """The value of an enumeration's member, or the string itself."""
    return str(getattr(value, "value", value))


def in_words(weights: Any, inputs: Any) -> str:
    """A scheme as text: `FP8 weights by channel, dynamic FP8 activations by token`."""
    text = f"{_kind(weights)} weights by {_by(weights)}"
    if inputs is None:
        return f"{text}, activations as they are"
    when = "dynamic" if inputs.dynamic else "static"
    return f"{text}, {when} {_kind(inputs)} activations by {_by(inputs)}"


def _kind(args: Any) -> str:
    plain = f"{'FP' if word_of(args.type) == 'float' else 'INT'}{args.num_bits}"
    if word_of(args.strategy) == "tensor_group":
        return f"NV{plain}"
    return plain if args.symmetric else f"asymmetric {plain}"


def _by(args: Any) -> str:
    strategy = word_of(args.strategy)
    if strategy in ("group", "tensor_group"):
        return f"group of {args.group_size}"
    if strategy == "block":
        return f"block of {args.block_structure[0]}x{args.block_structure[1]}"
    return strategy


def schemes(quant_config: Any) -> list[str]:
    """The schemes of a compressed-tensors configuration as texts, without duplicates."""
    texts = (
        in_words(group["weights"], group["input_activations"])
        for group in quant_config.target_scheme_map.values()
    )
    return list(dict.fromkeys(texts))
