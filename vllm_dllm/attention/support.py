"""Which attention a model's layers take, and why; or which would do.

A route is a way to say the model's masks to an attention backend:

- *rules*: our kernel takes a rule for each request;
- *virtual sequences*: a prefill chunk is cut into its blocks, each non-causal (LLaDA2);
- *causal tensor*: one flag a request (DiffusionGemma);
- *canvas rows*: the causal tensor, and on sliding-window layers each row of a canvas once more as
  a sequence of its own (DiffusionGemma's reference window on the CPU).

Nothing falls back: a mask that a layer's backend cannot express ends the start-up with the names
of the backends that can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

OURS = "CUSTOM"
# Backends that take one causal flag a request, FLASH_ATTN from this version on.
CAUSAL_TENSOR = ("TRITON_ATTN", "CPU_ATTN")
FLASH_WITH_TENSOR = 4


@dataclass(frozen=True)
class LayerKind:
    """Layers that are masked and served alike.

    Attributes:
        backend: vLLM's name of their attention backend.
        window: W of their sliding window, or None.
        non_causal: whether the backend has non-causal attention in a paged cache.
        flash_version: of FlashAttention, or None.
    """

    backend: str
    window: int | None
    non_causal: bool
    flash_version: int | None = None

    def __str__(self) -> str:
        version = f" {self.flash_version}" if self.flash_version else ""
        return f"{'sliding-window' if self.window else 'global'} layers, {self.backend}{version}"


@dataclass(frozen=True)
class Masking:
    """What a model's layers have to mask.

    Attributes:
        blocks: prompts and canvases are block-causal (LLaDA2); else prompts are causal and
            canvases bidirectional (DiffusionGemma).
        window: ``dllm.window``, how a canvas sees sliding-window layers.
        length: of a canvas.
    """

    blocks: bool
    window: str
    length: int


@dataclass(frozen=True)
class Route:
    """How layers get their mask, and why so."""

    name: str
    why: str


def route_of(kind: LayerKind, masking: Masking) -> Route:
    """The route of layers of this kind.

    Raises:
        ValueError: no route; names the backends that have one.
    """
    if kind.backend == OURS:
        return Route("rules", "the kernel takes a rule for each request")
    if masking.blocks:
        if not kind.non_causal:
            raise ValueError(
                f"{kind}: no non-causal attention, which block diffusion needs; choose "
                "--attention-backend FLASH_ATTN, FLASHINFER, TRITON_ATTN or CUSTOM"
            )
        return Route("virtual sequences", "the backend has non-causal attention, but no blocks")
    if kind.backend not in CAUSAL_TENSOR and (
        kind.backend != "FLASH_ATTN" or (kind.flash_version or 0) < FLASH_WITH_TENSOR
    ):
        raise ValueError(
            f"{kind}: prompts and canvases of one batch are masked differently, which this backend "
            "cannot say; choose --attention-backend FLASH_ATTN with FlashAttention 4, TRITON_ATTN "
            "or CUSTOM"
        )
    if kind.window is None or masking.window == "symmetric":
        _check_long_canvas(kind, masking)
        return Route("causal tensor", "the backend takes one causal flag a request")
    if kind.backend != "CPU_ATTN":
        raise ValueError(
            f"dllm.window=reference: {kind}: the backend has no left edge that is the same for "
            "a whole canvas; choose --attention-backend CUSTOM, or window=symmetric (the "
            "default, as vLLM does)"
        )
    return Route("canvas rows", "no window of the backend has one left edge for a canvas")


def _check_long_canvas(kind: LayerKind, masking: Masking) -> None:
    """Refuse what vLLM's Triton backend computes wrongly.

    Of a query tile's values it drops those beyond the window of the tile's *first* row, with
    their weights left in the sum: the window's right edge, which a canvas within W never meets.
    """
    if kind.backend == "TRITON_ATTN" and kind.window and masking.length > kind.window:
        raise ValueError(
            f"{kind}: a canvas of {masking.length} is longer than the window {kind.window}, which "
            "this backend computes wrongly; choose --attention-backend CUSTOM"
        )


def choose_routes(kinds: Iterable[LayerKind], masking: Masking) -> dict[LayerKind, Route]:
    """The routes of a model's layers.

    Raises:
        ValueError: as `route_of`; or some layers have our backend and others do not.
    """
    routes = {kind: route_of(kind, masking) for kind in kinds}
    backends = {kind.backend for kind in routes}
    if OURS in backends and len(backends) > 1:
        others = ", ".join(sorted(backends - {OURS}))
        raise ValueError(
            f"some layers have attention backend CUSTOM (vllm-dllm), others {others}; choose one "
            "with --attention-backend"
        )
    return routes


def check_choice(vllm_config: VllmConfig, masking: Masking) -> None:
    """Refuse early, before weights are read, an attention backend that can have no route.

    Raises:
        ValueError: as `route_of`; or the platform would ignore the choice.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    chosen = vllm_config.attention_config.backend
    if current_platform.is_cpu():
        if chosen is None or chosen.name == "CPU_ATTN":
            return
        if chosen.name != OURS:
            raise ValueError(
                f"--attention-backend {chosen.name}: the CPU platform has CPU_ATTN only; remove it"
            )
        if not HAS_TRITON:
            raise ValueError(
                f"--attention-backend {OURS}: vllm-dllm's attention is a Triton kernel, and vLLM "
                "has no Triton here; remove it"
            )
    if chosen is not None:
        # What is not known yet is taken for the best that it may turn out to be.
        backend = chosen.get_class()
        window = None if masking.blocks else masking.length
        best = LayerKind(_name(backend), window, backend.supports_non_causal(), FLASH_WITH_TENSOR)
        route_of(best, masking)
    elif masking.window == "reference":
        raise ValueError(
            f"dllm.window=reference needs --attention-backend {OURS}: no other backend of this "
            "platform has one left edge for a whole canvas. Or use window=symmetric (the default, "
            "as vLLM does)"
        )


def _name(backend: Any) -> str:
    """VLLM's name of a backend class; whoever else fills its one free name is told from us."""
    name: str = backend.get_name()
    ours = backend.__module__ == "vllm_dllm.attention.backend"
    return name if ours or name != OURS else f"{name} of {backend.__module__}"


def layer_kinds(vllm_config: VllmConfig) -> list[LayerKind]:
    """The kinds of attention layers that vLLM made."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    found: dict[LayerKind, None] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        backend = layer.get_attn_backend()
        kind = LayerKind(
            _name(backend),
            layer.sliding_window,
            backend.supports_non_causal(),
            # Only FlashAttention's layers have versions.
            getattr(layer.impl, "vllm_flash_attn_version", None),
        )
        found[kind] = None
    return list(found)


def take_routes(vllm_config: VllmConfig, masking: Masking) -> bool:
    """Settle the routes of a model that is loaded, with one log line.

    Returns:
        Whether the layers have our backend, which wants rules for its requests.

    Raises:
        ValueError: as `choose_routes`.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    routes = choose_routes(layer_kinds(vllm_config), masking)
    logger.info("dllm: attention: %s", described(routes))
    if any(route.name == "canvas rows" for route in routes.values()):
        from vllm_dllm.cpu.reference_window import use_reference_window

        use_reference_window(get_layers_from_vllm_config(vllm_config, Attention))
    return any(route.name == "rules" for route in routes.values())


def described(routes: dict[LayerKind, Route]) -> str:
    """All routes in one line."""
    return "; ".join(f"{kind}: {route.name} ({route.why})" for kind, route in routes.items())
