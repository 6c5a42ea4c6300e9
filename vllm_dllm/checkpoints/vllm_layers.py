"""Ask vLLM's own layers which tensors they load, for methods whose layouts only vLLM knows.

ModelOpt, GPTQ, AWQ and others state one scheme for a whole checkpoint and the layers that it leaves
out. A linear layer without memory is built for each matrix, so that its tensors are those that vLLM
will read, by name, shape and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dllm.checkpoints.verify import FLOATS, Stored

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

# The attributes of vLLM's configurations that list layers, and whether these are quantized.
LISTS = {
    "exclude_modules": False,
    "modules_to_not_convert": False,
    "modules_in_block_to_quantize": True,
}
_LATER_EXPERT = re.compile(r"\.experts\.(?!0\.)\d+\.")


def parts_of(
    module: str, shape: tuple[int, ...], quant_config: QuantizationConfig
) -> dict[str, Stored] | None:
    """The tensors that replace a matrix ``[out, in]`` in a checkpoint, by last part of name.

    Args:
        module: the layer's name in vLLM, its projections not fused.
        shape: of the matrix.
        quant_config: the checkpoint's quantization.

    Returns:
        How they are stored, or None for a layer that is not quantized.
    """
    layer = _layer(module, shape, quant_config)
    if isinstance(layer.quant_method, UnquantizedLinearMethod):
        return None
    group = f"quantization_config ({in_words(quant_config)})"
    return {
        name: Stored(tuple(parameter.shape), _dtypes(parameter.dtype), group)
        for name, parameter in layer.named_parameters()
        if name != "input_scale" or not _is_weight_only(layer.quant_method)
    }


def _layer(module: str, shape: tuple[int, ...], quant_config: Any) -> ReplicatedLinear:
    out, size = shape
    with torch.device("meta"):
        return ReplicatedLinear(
            size, out, bias=False, quant_config=quant_config, prefix=module, disable_tp=True
        )


def _dtypes(loaded: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes in a file; vLLM converts numbers of 16 bits and more when it loads them."""
    return FLOATS if loaded in FLOATS else frozenset({loaded})


def _is_weight_only(method: Any) -> bool:
    """Whether ModelOpt's method drops the scale of its inputs, which older files have."""
    spec = getattr(method, "spec", None)
    return spec is not None and spec.activation is None


def choose_as_listed(
    quant_config: QuantizationConfig, spellings: Mapping[str, Iterable[str]]
) -> None:
    """Make vLLM leave out the layers that a checkpoint leaves out, whatever it calls them.

    vLLM translates the beginnings of names in a configuration, but not patterns such as
    ``*decoder.layers.0*``; and a layer that it fuses may have fewer parts in the checkpoint.

    Args:
        quant_config: changed in place.
        spellings: for vLLM's name of each layer (projections not fused) its names in checkpoints.
    """
    listed = next((name for name in LISTS if getattr(quant_config, name, None)), None)
    if listed is None or getattr(quant_config, "quantized_layers", None):
        return  # ModelOpt's mixed schemes name each layer
    names_listed: list[str] = getattr(quant_config, listed)
    if listed not in getattr(quant_config, "full_config", {listed}):
        _keep_layers(names_listed, spellings)
    plain, wanted = _layer("", (64, 64), None), LISTS[listed]

    def is_quantized(name: str) -> bool:
        method = quant_config.get_quant_method(plain, name)
        return not isinstance(method, UnquantizedLinearMethod)

    added = [
        own
        for own, names in spellings.items()
        if not _LATER_EXPERT.search(own)
        and is_quantized(own) != wanted
        and any(is_quantized(name) == wanted for name in names)
    ]
    names_listed.extend(added)


def _keep_layers(listed: list[str], layers: Iterable[str]) -> None:
    """Drop the names of modules that contain layers.

    Where a configuration has no list, vLLM collects the owners of all tensors that are not
    quantized, and then looks for them in the names of layers: a scale of a whole decoder layer, as
    DiffusionGemma has, would leave out everything in it.
    """
    owners = {own[:dot] for own in layers for dot in range(len(own)) if own[dot] == "."}
    listed[:] = [name for name in listed if name not in owners]


def keep_plain_head(head: Any) -> None:
    """Give a head that is not quantized the method of an unquantized model's.

    Some methods give it that of linear layers, which on a CPU drops the matrix once it is packed.
    """
    if isinstance(getattr(head, "quant_method", None), UnquantizedLinearMethod):
        head.quant_method = UnquantizedEmbeddingMethod()


def in_words(quant_config: Any) -> str:
    """A method and its scheme as text, such as `ModelOpt NVFP4` or `GPTQ, 4 bits`."""
    name = quant_config.get_name()
    if name.startswith("modelopt"):
        return f"ModelOpt {getattr(quant_config, 'quant_method', 'MIXED_PRECISION')}"
    if name in ("auto_awq", "auto_gptq"):
        size = quant_config.group_size
        by = "by channel" if size == -1 else f"in groups of {size}"
        return f"{name.removeprefix('auto_').upper()}, {quant_config.weight_bits} bits {by}"
    return str(name)
