"""Updates layers whose kernels read weights in a packed layout while the engine runs.

vLLM's CPU kernels pack the weights of the first checkpoint. Anything that a weight loader writes
into such a layer later would be read as if it were packed, or the weight no longer exists. Inside
`unpacked`, the loaders of packed layers write into plain tensors, which are packed when the update
ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


@contextmanager
def unpacked(model: torch.nn.Module) -> Iterator[None]:
    """A context in which any part of the weights may be loaded; layers are packed when it ends.

    After an exception packed layers keep their previous weights.
    """
    # The packed parameters of layers that temporarily hold plain ones.
    packed: dict[torch.nn.Module, dict[str, torch.nn.Parameter]] = {}
    # Layers that keep a plain matrix, which the update has written, next to the packed one.
    rewritten: set[torch.nn.Module] = set()
    with ExitStack() as loaders:
        for layer in model.modules():
            for name in _packed_names(layer):
                load = functools.partial(_load_plain, packed, layer, name)
                loaders.enter_context(_loading_by(getattr(layer, name), load))
        for layer, owner in _plain_matrices(model):
            if layer is owner:
                original = getattr(layer.weight, "weight_loader", default_weight_loader)
                load = functools.partial(_load_and_note, rewritten, layer, original)
                loaders.enter_context(_loading_by(layer.weight, load))
        try:
            yield
            for layer, parameters in packed.items():
                _process(layer)
                for name, parameter in parameters.items():
                    parameter.data.copy_(getattr(layer, name))
        finally:
            for layer, parameters in packed.items():
                for name, parameter in parameters.items():
                    setattr(layer, name, parameter)
            for layer in rewritten:
                _process(layer)


def share_tied_matrices(model: torch.nn.Module) -> None:
    """Make a head use the packed matrix of the embedding to which it is tied.

    vLLM packs the shared matrix once for each, and a reload renews only one of them.
    """
    for layer, owner in _plain_matrices(model):
        if layer is not owner:
            layer.cpu_linear = functools.partial(_multiply_as, owner)


def _multiply_as(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    return owner.cpu_linear(x, weight, bias)


def _plain_matrices(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """The layers with a plain matrix next to a packed one, and the first layer that has it."""
    owners: dict[int, Any] = {}
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            yield layer, owners.setdefault(id(layer.weight), layer)


def _packed_names(layer: Any) -> tuple[str, ...]:
    """The parameters of a layer that exist in packed form only."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        is_packed = method.unquantized_backend == UnquantizedMoeBackend.CPU
        if is_packed and not method.moe_kernel.fused_experts._use_zentorch:
            return "w13_weight", "w2_weight"
    elif hasattr(layer, "cpu_linear") and layer.weight.numel() == 0:
        return ("weight",)
    return ()


@contextmanager
def _loading_by(parameter: Any, load: Callable[..., Any]) -> Iterator[None]:
    """A context in which `load` is the loader of a parameter."""
    before = vars(parameter).get("weight_loader")
    parameter.weight_loader = load
    try:
        yield
    finally:
        if before is None:
            del parameter.weight_loader
        else:
            parameter.weight_loader = before


def _load_plain(
    packed: dict[torch.nn.Module, dict[str, torch.nn.Parameter]],
    layer: torch.nn.Module,
    name: str,
    param: Any,
    loaded_weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load into a plain parameter in place of `param`; the first call unpacks the layer."""
    if layer not in packed:
        packed[layer] = {each: getattr(layer, each) for each in _packed_names(layer)}
        recorded = get_layerwise_info(layer).restore_metadata[0]
        for each, parameter in packed[layer].items():
            before = restore_layer_refs(to_meta_tensor(recorded[each]), layer)
            plain = materialize_meta_tensor(before)
            # An earlier reload has wrapped the loader that vLLM recorded.
            plain.weight_loader = _get_original_loader(plain)
            plain.data.copy_(packed_values(layer, each, parameter, plain))
            setattr(layer, each, plain)
    plain = getattr(layer, name)
    return plain.weight_loader(plain, loaded_weight, *args, **kwargs)


def _load_and_note(
    rewritten: set[torch.nn.Module],
    layer: torch.nn.Module,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    rewritten.add(layer)
    return original(*args, **kwargs)


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
    if not torch.equal(cpu_prepack_moe_weight(plain, isa), packed):
        raise RuntimeError(
            "experts cannot be updated in part here: the kernel's layout is not known; use "
            "`reload_weights`"
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


def _process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)
