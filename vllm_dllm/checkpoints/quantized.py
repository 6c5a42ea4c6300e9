"""Quantized checkpoints: the names, shapes and schemes that a `quantization_config` implies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.checkpoints.verify import Shapes

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

COMPRESSED = "compressed-tensors"
# vLLM's name of the method that quantizes a checkpoint while loading it (`--quantization fp8`).
ONLINE = "online"
# Scales of a quantized KV cache; vLLM knows several names for each and reads them itself.
KV_SCALES = re.compile(r"\.[qkv](_proj)?[._](output_)?(scale|zero_point)$")


class Linear(torch.nn.Module):
    """Stands for any linear layer where vLLM asks for a layer's class name."""


def scheme_of(quant_config: Any, module: str) -> dict[str, Any] | None:
    """The scheme of a linear layer in a compressed-tensors checkpoint, by vLLM's own matching.

    Args:
        quant_config: vLLM's compressed-tensors configuration, with the model's names mapped.
        module: the layer's name in vLLM, its projections not fused.

    Returns:
        `weights`, `input_activations` (`QuantizationArgs` or None) and `format`, or None for a
        layer that is left alone.
    """
    return quant_config.get_scheme_dict(Linear(), module)


def expected(
    plain: Shapes,
    quant_config: QuantizationConfig | None,
    is_linear: Callable[[str], bool],
    vllm_name: Callable[[str], str] = lambda name: name,
) -> Shapes | None:
    """The name and shape of every tensor of a checkpoint, quantized or not.

    Args:
        plain: the tensors of an unquantized checkpoint, one matrix for each linear layer.
        quant_config: the checkpoint's quantization, or None.
        is_linear: whether a tensor's name is that of a layer that vLLM's class can quantize.
        vllm_name: maps a name in `plain` to vLLM's name, before projections are fused.

    Returns:
        The shapes by name, or None for a method whose tensors are not known here.
    """
    if quant_config is None or quant_config.get_name() == ONLINE:
        return plain
    if quant_config.get_name() != COMPRESSED:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in plain.items():
        module = name.removesuffix(".weight")
        scheme = None
        if is_linear(name):
            scheme = scheme_of(quant_config, vllm_name(name).removesuffix(".weight"))
        if scheme is None:
            shapes[name] = shape
            continue
        stored = stored_as(shape, scheme)
        if stored is None:
            return None
        shapes |= {f"{module}.{part}": size for part, size in stored.items()}
    return shapes


def stored_as(shape: tuple[int, ...], scheme: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tensors that replace a matrix ``[out, in]`` in a checkpoint: shapes by last part of name.

    The layouts are those of the library compressed-tensors; None for one that is not known here.
    """
    out, size = shape
    weights, inputs = scheme["weights"], scheme["input_activations"]
    strategy, group = word_of(weights.strategy), weights.group_size
    groups = -(-size // group) if group and group > 0 else 1
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
    static = inputs is not None and not inputs.dynamic
    layout = scheme["format"]
    if layout in ("float-quantized", "int-quantized", "naive-quantized"):
        parts: dict[str, Any] = {"weight": shape, "weight_scale": scale}
        if not weights.symmetric:
            parts["weight_zero_point"] = scale
        if static:
            parts["input_scale"] = (1,)
            if not inputs.symmetric:
                parts["input_zero_point"] = (1,)
        return parts
    if layout == "pack-quantized" and inputs is None:
        in_word = 32 // weights.num_bits
        parts = {"weight_packed": (out, -(-size // in_word)), "weight_scale": scale}
        parts["weight_shape"] = (2,)
        if not weights.symmetric:
            parts["weight_zero_point"] = (-(-out // in_word), scale[1])
        return parts
    if layout == "nvfp4-pack-quantized":
        parts = {"weight_packed": (out, size // 2), "weight_scale": scale}
        parts["weight_global_scale"] = (1,)
        if inputs is not None:
            parts["input_global_scale"] = (1,)
        return parts
    return None


def spell_out(
    quant_config: QuantizationConfig | None, spellings: Mapping[str, Iterable[str]]
) -> None:
    """Make patterns for a checkpoint's layer names also match vLLM's names.

    vLLM translates the names that a `quantization_config` lists, but no regular expressions. Where
    an entry matches one of a layer's `spellings`, the layer's vLLM name is added.

    Args:
        quant_config: changed in place; methods other than compressed-tensors are left unchanged.
        spellings: for vLLM's name of each layer (projections not fused) its names in checkpoints.
    """
    if quant_config is None or quant_config.get_name() != COMPRESSED:
        return
    ignored, targets = quant_config.ignore, quant_config.target_scheme_map
    for own, names in spellings.items():
        names = tuple(names)
        if not any(_matches(entry, own) for entry in ignored) and any(
            _matches(entry, name) for entry in ignored for name in names
        ):
            ignored.append(own)
        if not any(_matches(entry, own) for entry in targets):
            for entry in list(targets):
                if any(_matches(entry, name) for name in names):
                    targets[own] = targets[entry]
                    break


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


@contextlib.contextmanager
def naming_the_scheme(quant_config: QuantizationConfig | None) -> Iterator[None]:
    """A context that adds the names of scheme and platform to vLLM's errors about building layers.

    Raises:
        ValueError: a layer could not be built, for example because its scheme has no kernel.
    """
    from vllm.platforms import current_platform

    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
        if quant_config is None:
            raise
        method = quant_config.get_name()
        names = schemes(quant_config) if method == COMPRESSED else [method]
        raise ValueError(
            f"quantization {'; '.join(names)} on {current_platform.device_type} "
            f"({current_platform.get_device_name()}): {error or type(error).__name__}"
        ) from error
