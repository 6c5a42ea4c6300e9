"""Updates layers whose kernels read weights in a packed layout while the engine runs.

vLLM's CPU kernels pack the weights of the first checkpoint. Anything that a weight loader writes
into such a layer later would be read as if it were packed, or the weight no longer exists. Here the
loaders of packed layers write into plain tensors, which are packed when the update ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

# Kernels that read experts as the checkpoint stores them, and the one whose layout is known here.
_KNOWN_EXPERTS = (
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.CPU,
)
# By element size in bytes: an integer type, and the bits of a NaN that no computation produces.
# They mark elements that an update has not written.
_UNWRITTEN = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}


class PackedLayers:
    """The packed layers of a model. It is created after the first weights have been packed.

    Attributes:
        has_unknown_experts: whether experts are in a layout that is not known here.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.has_unknown_experts = False
        self._loaders: list[tuple[Any, Callable[..., Any]]] = []
        # What the update has touched: the packed parameters of layers that temporarily hold plain
        # ones, and layers that keep a plain matrix next to the packed one.
        self._unpacked: dict[torch.nn.Module, dict[str, torch.nn.Parameter]] = {}
        self._rewritten: set[torch.nn.Module] = set()
        owners: dict[int, torch.nn.Module] = {}
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                self.has_unknown_experts |= method.unquantized_backend not in _KNOWN_EXPERTS
                if _packs_experts(method):
                    self._redirect_to_plain(layer, ("w13_weight", "w2_weight"))
            elif hasattr(layer, "cpu_linear"):
                owner = owners.setdefault(id(layer.weight), layer)
                if owner is not layer:
                    _multiply_as(layer, owner)
                elif layer.weight.numel() == 0:
                    self._redirect_to_plain(layer, ("weight",))
                else:
                    self._watch(layer, layer.weight)

    @contextmanager
    def updated(self) -> Iterator[None]:
        """A context in which weights may be loaded; packed layers have them when it ends.

        After an exception these layers keep their previous weights.
        """
        # Repeated for each update, because trainers set their own loaders: verl gives vLLM's to
        # experts.
        for parameter, load in self._loaders:
            parameter.weight_loader = load
        try:
            yield
            for layer, packed in self._unpacked.items():
                _pack(layer, packed)
        finally:
            for layer, packed in self._unpacked.items():
                for name, parameter in packed.items():
                    setattr(layer, name, parameter)
            for layer in self._rewritten:
                _process(layer)
            self._unpacked.clear()
            self._rewritten.clear()

    def _redirect_to_plain(self, layer: torch.nn.Module, names: tuple[str, ...]) -> None:
        """Make loaders write to plain parameters instead of packed ones."""
        packed = {name: getattr(layer, name) for name in names}
        # Use copies, because vLLM's reload changes its own loaders.
        recorded = get_layerwise_info(layer).restore_metadata[0]
        before = {name: restore_layer_refs(to_meta_tensor(recorded[name]), layer) for name in names}

        def loader_of(name: str) -> Callable[..., Any]:
            def load(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if layer not in self._unpacked:
                    self._unpacked[layer] = packed
                    for each in names:
                        setattr(layer, each, _unwritten(before[each]))
                plain = getattr(layer, name)
                return plain.weight_loader(plain, loaded_weight, *args, **kwargs)

            return load

        for name, parameter in packed.items():
            self._loaders.append((parameter, loader_of(name)))

    def _watch(self, layer: torch.nn.Module, weight: Any) -> None:
        """Note when a plain matrix is written from which the layer has packed another one."""
        loader = getattr(weight, "weight_loader", default_weight_loader)

        def load(*args: Any, **kwargs: Any) -> Any:
            self._rewritten.add(layer)
            return loader(*args, **kwargs)

        self._loaders.append((weight, load))


def _packs_experts(method: UnquantizedFusedMoEMethod) -> bool:
    if method.unquantized_backend != UnquantizedMoeBackend.CPU:
        return False
    return not method.moe_kernel.fused_experts._use_zentorch


def _multiply_as(layer: Any, owner: Any) -> None:
    """Make a head use the packed matrix of the embedding to which it is tied.

    vLLM packs the shared matrix once for each, and an update renews only one of them.
    """
    layer.cpu_linear = lambda x, weight, bias: owner.cpu_linear(x, weight, bias)


def _unwritten(before: torch.Tensor) -> torch.Tensor:
    """A parameter as it was before it was packed, with no element written yet."""
    parameter = materialize_meta_tensor(before)
    _bits(parameter.data).fill_(_mark(parameter))
    return parameter


def _pack(layer: torch.nn.Module, packed: dict[str, torch.nn.Parameter]) -> None:
    """Pack a layer's plain parameters into `packed`; what was not written stays as it was."""
    for name, parameter in packed.items():
        plain = getattr(layer, name).data
        unwritten = _bits(plain) == _mark(plain)
        if unwritten.any():
            plain[unwritten] = packed_values(layer, name, parameter, plain)[unwritten]
    _process(layer)
    for name, parameter in packed.items():
        parameter.data.copy_(getattr(layer, name))


def packed_values(layer: Any, name: str, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Unpack a kernel's packed values into the shape of `like`."""
    if name == "weight":
        # The kernel itself reveals the values: each product has one term that is not zero.
        return layer.cpu_linear(torch.eye(like.shape[1], dtype=like.dtype), packed, None).t()
    return _unpacked_experts(layer, name, packed, like)


def _unpacked_experts(
    layer: Any, name: str, packed: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Recover ``[experts, out, in]`` from the result of vLLM's `cpu_prepack_moe_weight`."""
    isa = layer.quant_method.moe_kernel.fused_experts.isa
    plain = torch.empty_like(packed)
    order = _order_of_packed(packed.shape[1:], packed.dtype, isa)
    plain.view(len(packed), -1)[:, order] = packed.reshape(len(packed), -1)
    if not torch.equal(_bits(cpu_prepack_moe_weight(plain, isa)), _bits(packed)):
        raise RuntimeError(
            "experts cannot be updated in part here: the kernel's layout is not known; send each "
            "layer's experts in one call, or use `reload_weights`"
        )
    # The kernel pads each expert's channels, separately for gates and ups.
    if name == "w2_weight":
        return plain[..., : like.shape[2]]
    gate, up = plain.chunk(2, dim=1)
    size = like.shape[1] // 2
    return torch.cat([gate[:, :size], up[:, :size]], dim=1)


@functools.lru_cache(maxsize=2)  # of both matrices of an expert
def _order_of_packed(shape: torch.Size, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """The index of the plain element at each place of the packed matrix: int64 ``[elements]``.

    Packing permutes the elements of each expert. Packing the digits of their positions, which every
    dtype holds exactly, reveals the permutation.
    """
    positions = torch.arange(shape.numel())
    order = torch.zeros_like(positions)
    for shift in range(0, shape.numel().bit_length(), 8):
        digits = (positions >> shift & 255).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() << shift
    return order


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size."""
    return values.view(_UNWRITTEN[values.element_size()][0])


def _mark(values: torch.Tensor) -> int:
    return _UNWRITTEN[values.element_size()][1]


def _process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)
