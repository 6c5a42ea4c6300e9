"""The memory that a model's weights will take, from the headers of its files."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import _TYPES as DTYPES
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_dllm.checkpoints.authors_tensors import one_by_one
from vllm_dllm.checkpoints.quantized import MATRICES
from vllm_dllm.checkpoints.verify import FLOATS, HEAD, ONLINE, Shapes, VerifiedWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Tensors of a file that no layer keeps, or only as a few bytes.
_NOT_KEPT = ("g_idx", "weight_shape")
_TOWERS = ("vision_tower.", "embed_vision.")
# Sides that vLLM's kernel for 4-bit weights on a CPU can multiply with.
_UNIT = 32


class WeightBytes(NamedTuple):
    """Bytes of the weights of all ranks together, without the packed copies of a CPU's kernels.

    Attributes:
        stored: as the files store them, which is what a GPU holds.
        on_cpu: with the layers that are dequantized on this processor.
    """

    stored: int
    on_cpu: int


class _Part(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def weight_bytes(vllm_config: VllmConfig, model: type[VerifiedWeights]) -> WeightBytes | None:
    """The bytes of a model's weights; None where its files are not known.

    Args:
        vllm_config: the server's.
        model: the class that will load them.
    """
    config = vllm_config.model_config
    found = get_safetensors_params_metadata(config.model, revision=config.revision)
    if not found or not model.released_as:
        return None
    plain = model.tensor_shapes(config.hf_config)
    modules = _modules(found, model, HEAD in plain, _has_towers(config))
    shapes = {**plain, **one_by_one(plain)}
    online = vllm_config.quant_config is not None and vllm_config.quant_config.get_name() == ONLINE
    sizes = {
        name: _bytes_of(name, parts, shapes, config, model, online)
        for name, parts in modules.items()
    }
    # Layers that vLLM fuses with others may hold what the file has once.
    copies = [
        next(name for name in names if name in sizes)
        for own, names in model.spellings(config.hf_config).items()
        if f"{own}.weight" not in shapes and any(name in sizes for name in names)
    ]
    both = [*sizes.values(), *(sizes[name] for name in copies)]
    return WeightBytes(sum(one.stored for one in both), sum(one.on_cpu for one in both))


def _modules(
    found: dict[str, Any], model: type[VerifiedWeights], head: bool, towers: bool
) -> dict[str, dict[str, _Part]]:
    """The tensors of the files by module and last part of name; of copies one."""
    modules: dict[str, dict[str, _Part]] = defaultdict(dict)
    for name, info in found.items():
        if "dtype" not in info:  # what a file says about itself
            continue
        known = model.one_name(name)
        if known is None or (known == HEAD and not head):
            continue
        if not towers and any(tower in known for tower in _TOWERS):
            continue
        module, _, part = known.rpartition(".")
        if part not in _NOT_KEPT:
            dtype: Any = DTYPES[info["dtype"]]
            modules[module][part] = _Part(dtype, tuple(info["shape"]))
    return modules


def _has_towers(config: Any) -> bool:
    """Whether requests may bring pictures; without, vLLM builds nothing for them."""
    options = config.multimodal_config
    return options is None or any(map(options.get_limit_per_prompt, ("image", "video")))


def _bytes_of(
    module: str,
    parts: dict[str, _Part],
    shapes: Shapes,
    config: Any,
    model: type[VerifiedWeights],
    online: bool,
) -> WeightBytes:
    """The bytes of one module; `online` with `--quantization`, which makes matrices FP8."""
    width, is_expert = config.dtype.itemsize, ".experts" in module
    if model.is_float32(module, config.hf_config):
        width = torch.float32.itemsize
    matrix = next((parts[name] for name in MATRICES if name in parts), None)
    if matrix is None or matrix.dtype in FLOATS:
        numbers = sum(math.prod(part.shape) for part in parts.values())
        if matrix is not None and matrix.shape[0] == config.get_vocab_size():
            numbers += (pad_vocab_size(matrix.shape[0]) - matrix.shape[0]) * matrix.shape[1]
        if online and (is_expert or model.is_linear(f"{module}.weight")):
            return WeightBytes(numbers, numbers * (width if is_expert else 1))
        return WeightBytes(numbers * width, numbers * width)
    packed = matrix.dtype == torch.int32
    # Layers hold the scales of packed integers in the model's dtype, and others in float32.
    scale = width if packed else torch.float32.itemsize
    stored = sum(
        math.prod(part.shape) * (scale if part.dtype in FLOATS else part.dtype.itemsize)
        for part in parts.values()
    )
    shape = shapes[f"{module}.weight"]
    whole = width * math.prod(shape)
    bits = 8 * matrix.dtype.itemsize * math.prod(matrix.shape) / math.prod(shape)
    integer = packed or matrix.dtype == torch.int8
    if is_expert:
        kept = integer and bits <= 8 and _has_kernel_for_experts(config)
    else:
        kept = not packed or (bits == 4 and width == 2 and not any(side % _UNIT for side in shape))
    return WeightBytes(stored, stored if kept else whole)


def _has_kernel_for_experts(config: Any) -> bool:
    """Whether this processor multiplies with experts of integers as they are stored."""
    activation = getattr(config.hf_text_config, "hidden_act", None)
    return torch.cpu._is_amx_tile_supported() and activation == "silu"
