"""Verifies what a model loads: a wrong checkpoint is refused, naming its first wrong tensor."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from vllm_dllm.checkpoints.stored import Shapes, Stored, Weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A model that ties its head to the embedding may have this tensor in its file too; it is ignored.
HEAD = "lm_head.weight"
# vLLM's name of the method that quantizes a checkpoint while loading it (`--quantization fp8`).
ONLINE = "online"
# Scales of a quantized KV cache; vLLM knows several names for each and reads them itself.
KV_SCALES = re.compile(r"\.[qkv](_proj)?[._](output_)?(scale|zero_point)$")

logger = init_logger("vllm.dllm")


class VerifiedWeights:
    """Comes before vLLM's class among the bases of a model class, and verifies what it loads.

    Attributes:
        released_as: the model's name for error messages; nothing is verified for a class that
            leaves it out.
    """

    released_as: ClassVar[str] = ""
    failed_update: str | None = None
    _has_weights = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the layers, quantized as the checkpoint's library would read its configuration."""
        if vllm_config.quant_config is not None:
            from vllm_dllm.checkpoints.quantized import choose_as_written

            config = vllm_config.model_config.hf_config
            layers = self.spellings(config) if self.released_as else {}
            choose_as_written(vllm_config.quant_config, layers)
        init: Any = super().__init__  # vLLM's class
        build = functools.partial(init, vllm_config=vllm_config, prefix=prefix)
        if vllm_config.lora_config is None:
            build()
        else:
            from vllm_dllm.checkpoints.adapters import build_for_adapters

            build_for_adapters(self, build, vllm_config)
        self.vllm_config = vllm_config
        if vllm_config.quant_config is not None:
            from vllm_dllm.checkpoints.quantized import keep_plain_head

            keep_plain_head(getattr(self, "lm_head", None))

    def fused_from(self, name: str) -> list[str]:
        """VLLM's names of the layers that it has fused into one, in their order there."""
        prefix, dot, last = name.rpartition(".")
        packed: Mapping[str, list[str]] = getattr(self, "packed_modules_mapping", {})
        return [f"{prefix}{dot}{part}" for part in packed.get(last, [last])]

    @classmethod
    def tensor_shapes(cls, config: Any) -> Shapes:
        """Every tensor of an unquantized checkpoint, by its name there."""
        raise NotImplementedError

    @staticmethod
    def is_linear(name: str) -> bool:
        """Whether a tensor belongs to a layer that vLLM's class can quantize."""
        raise NotImplementedError

    @staticmethod
    def one_name(name: str) -> str | None:
        """One name for copies of a tensor; None for a tensor that is not read."""
        return name

    @staticmethod
    def vllm_name(name: str) -> str:
        """VLLM's name of a tensor, before projections are fused; `name` is from `one_name`."""
        return name

    @classmethod
    def spellings(cls, config: Any) -> Mapping[str, Iterable[str]]:
        """For vLLM's name of each layer that can be quantized, its names in checkpoints."""
        names = filter(cls.is_linear, cls.tensor_shapes(config))
        modules = (name.removesuffix(".weight") for name in names)
        return {cls.vllm_name(module): [module] for module in modules}

    def process_weights_after_loading(self) -> None:
        """Called by vLLM once, after it has packed the first weights."""
        self._has_weights = True
        text_config = self.vllm_config.model_config.hf_text_config
        if current_platform.is_cpu() and text_config.tie_word_embeddings:
            from vllm_cpu_v2.packed_layers import share_tied_matrices

            share_tied_matrices(cast(torch.nn.Module, self))

    def verified_weights(self, weights: Weights, whole: bool) -> Weights:
        """Pass the tensors on, checked; see `verified`."""
        if not self.released_as:
            return weights
        quant_config, scales = self.vllm_config.quant_config, None
        plain = self.tensor_shapes(self.vllm_config.model_config.hf_config)
        tensors = {name: Stored(shape) for name, shape in plain.items()}
        if quant_config is not None:
            from vllm_dllm.checkpoints.quantized import quantized_tensors

            scales = KV_SCALES
            if quant_config.get_name() != ONLINE:
                with set_current_vllm_config(self.vllm_config):
                    tensors = quantized_tensors(plain, quant_config, self.is_linear, self.vllm_name)
        return verified(weights, tensors, self.released_as, self.one_name, scales, whole)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint, or later an update, which may be partial; see `checkpoints.updates`.

        Raises ValueError, which names a tensor that is wrong, or missing at the start.
        """
        # An engine that started with dummy weights gets all of them as a reload.
        reloads = get_layerwise_info(cast(torch.nn.Module, self)).kernel_tensors is not None
        if reloads or self._has_weights:
            from vllm_dllm.checkpoints.updates import load_bucket, load_reload

            return (load_reload if reloads else load_bucket)(self, weights)
        return self.load_verified(self.verified_weights(weights, whole=True))

    def load_verified(self, weights: Weights) -> set[str]:
        """Load tensors as vLLM's class does."""
        loader: Any = super()
        loaded: set[str] = loader.load_weights(weights)
        return loaded


def verified(
    weights: Weights,
    expected: Mapping[str, Stored],
    architecture: str,
    one_name: Callable[[str], str | None] = lambda name: name,
    beside: re.Pattern[str] | None = None,
    whole: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, and raise unless they are the `expected` tensors.

    All checks are in one loop, because each tensor is read once.

    Args:
        weights: the tensors of a checkpoint by their names in its files, see also `saved_names`.
        expected: all tensors that the checkpoint must have, by the name from `one_name`.
        architecture: the model's name for error messages.
        one_name: see `VerifiedWeights.one_name`.
        beside: tensors whose names match may exist in addition, and are passed on unchecked.
        whole: whether all expected tensors must come.

    Raises:
        ValueError: a tensor does not belong to the architecture, has another shape or dtype, or
            differs from its copy; or, after all tensors have been passed on, some are missing.
    """
    missing, passed_over = set(expected), list[str]()
    came: dict[str, tuple[str, torch.Tensor]] = {}  # names in the file, and checksums
    for name, tensor in weights:
        if beside is not None and beside.search(name):
            yield name, tensor
            continue
        known = one_name(name)
        if known is None or (known == HEAD and HEAD not in expected):
            continue
        if known not in expected:
            from vllm_dllm.checkpoints.saved_names import unwrapped

            name = unwrapped(name, lambda plain: one_name(plain) in expected)
            known = one_name(name)
            assert known is not None
        if known not in expected:
            from vllm_dllm.checkpoints.quantized import check_unexpected

            check_unexpected(name, known, tensor, expected, missing, architecture)
            passed_over.append(name)
            continue
        shape, dtypes, _ = expected[known]
        if tensor.dtype not in dtypes:
            from vllm_dllm.checkpoints.quantized import refuse_dtype

            refuse_dtype(name, known, tensor, expected)
        # A single number may be stored as () or (1,).
        if (
            shape is not None
            and tuple(tensor.shape) != shape
            and not tensor.numel() == math.prod(shape) == 1
        ):
            from vllm_dllm.checkpoints.saved_names import refuse_shape

            refuse_shape(name, tensor, shape)
        if whole:
            checksum = _checksum(tensor)
            first, of_first = came.setdefault(known, (name, checksum))
            if not torch.equal(checksum, of_first):
                which = f"tensors {first!r} and {name!r}" if first != name else f"tensor {name!r}"
                raise ValueError(
                    f"{which}: the checkpoint has two copies of a tensor, and they differ; remove "
                    "the wrong one, or make them equal"
                )
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


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all bits in words of 64 bits, which a change of any element changes; int64 []."""
    data = tensor.flatten().view(torch.uint8)
    if data.storage_offset() % 8:  # a view of wider words must begin at one
        data = data.clone()
    words = len(data) // 8 * 8
    return data[:words].view(torch.int64).sum() + data[words:].sum()


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
