"""The choice, at start-up, of how an attention backend expresses a model's masks.

There are four methods to express a model's masks to an attention backend:

- *rules*: our kernel takes a mask rule for each request;
- *virtual sequences*: a prefill chunk is cut into its blocks, each non-causal (LLaDA2);
- *causal tensor*: one causal flag for each request (DiffusionGemma);
- *canvas rows*: the causal tensor, and on sliding-window layers each row of a canvas is computed
  once more, as a sequence of its own (DiffusionGemma's reference window on the CPU).

Nothing falls back: a mask that a layer's backend cannot express ends the start-up with an error
that names the backends that can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")

# The name that vLLM has for backends of third parties, and under which ours is registered.
OURS = "CUSTOM"
# Backends that take one causal flag for each request; FLASH_ATTN does from this version on.
CAUSAL_TENSOR = ("TRITON_ATTN", "CPU_ATTN")
FLASH_VERSION_WITH_CAUSAL_TENSOR = 4


@dataclass(frozen=True)
class LayerBackend:
    """What computes the attention of some layers, as far as masks depend on it.

    Attributes:
        backend: vLLM's name of the layers' attention backend.
        window: W of the layers' sliding window, or None.
        non_causal: whether the backend has non-causal attention in a paged cache.
        flash_version: version of FlashAttention, or None for other backends.
    """

    backend: str
    window: int | None
    non_causal: bool
    flash_version: int | None = None

    def __str__(self) -> str:
        version = f" {self.flash_version}" if self.flash_version else ""
        return f"{'sliding-window' if self.window else 'global'} layers, {self.backend}{version}"


@dataclass(frozen=True)
class ModelMasks:
    """The masks that a model needs.

    Attributes:
        block_causal: whether prompts and canvases are block-causal (LLaDA2); otherwise prompts are
            causal and canvases bidirectional (DiffusionGemma).
        window: ``dllm.window``, how a canvas sees sliding-window layers.
        canvas_length: tokens of a canvas.
    """

    block_causal: bool
    window: str
    canvas_length: int


@dataclass(frozen=True)
class MaskSupport:
    """How a backend expresses the masks of its layers.

    Attributes:
        method: one of the four that the module's docstring lists.
        reason: why this one; for the log.
    """

    method: str
    reason: str


LayerSupport = tuple[LayerBackend, MaskSupport]


def support_for(layers: LayerBackend, masks: ModelMasks) -> MaskSupport:
    """How these layers express the model's masks.

    Raises:
        ValueError: they cannot express them; the message names the backends that can.
    """
    if layers.backend == OURS:
        return MaskSupport("rules", "the kernel takes a rule for each request")
    if masks.block_causal:
        if not layers.non_causal:
            raise ValueError(
                f"{layers}: no non-causal attention, which block diffusion needs; choose "
                "--attention-backend FLASH_ATTN, FLASHINFER, TRITON_ATTN or CUSTOM"
            )
        return MaskSupport(
            "virtual sequences", "the backend has non-causal attention, but no blocks"
        )
    if layers.backend not in CAUSAL_TENSOR and (
        layers.backend != "FLASH_ATTN"
        or (layers.flash_version or 0) < FLASH_VERSION_WITH_CAUSAL_TENSOR
    ):
        raise ValueError(
            f"{layers}: prompts and canvases of one batch are masked differently, which this "
            "backend cannot say; choose --attention-backend FLASH_ATTN with FlashAttention 4, "
            "TRITON_ATTN or CUSTOM"
        )
    if layers.window is None or masks.window == "symmetric":
        _check_long_canvas(layers, masks)
        return MaskSupport("causal tensor", "the backend takes one causal flag a request")
    if layers.backend != "CPU_ATTN":
        raise ValueError(
            f"dllm.window=reference: {layers}: the backend has no left edge that is the same for "
            "a whole canvas; choose --attention-backend CUSTOM, or window=symmetric (the "
            "default, as vLLM does)"
        )
    return MaskSupport("canvas rows", "no window of the backend has one left edge for a canvas")


def _check_long_canvas(layers: LayerBackend, masks: ModelMasks) -> None:
    """Refuse a canvas longer than the window on vLLM's Triton backend, which computes it wrongly.

    For a whole query tile, that backend drops the values beyond the right edge of the window of the
    tile's *first* row, but leaves their weights in the sum. A canvas of at most W tokens never
    reaches that edge.
    """
    length, window = masks.canvas_length, layers.window
    if layers.backend == "TRITON_ATTN" and window and length > window:
        raise ValueError(
            f"{layers}: a canvas of {length} is longer than the window {window}, which "
            "this backend computes wrongly; choose --attention-backend CUSTOM"
        )


def support_for_all(all_layers: Iterable[LayerBackend], masks: ModelMasks) -> list[LayerSupport]:
    """How each of a model's layers expresses the model's masks.

    Raises:
        ValueError: as `support_for`; or some layers have our backend and others do not.
    """
    support = [(layers, support_for(layers, masks)) for layers in all_layers]
    backends = {layers.backend for layers, _ in support}
    if OURS in backends and len(backends) > 1:
        other_backends = ", ".join(sorted(backends - {OURS}))
        raise ValueError(
            f"some layers have attention backend CUSTOM (vllm-dllm), others "
            f"{other_backends}; choose one with --attention-backend"
        )
    return support


def check_backend_choice(vllm_config: VllmConfig, masks: ModelMasks) -> None:
    """Refuse a chosen attention backend that cannot express the masks, before weights are read.

    Raises:
        ValueError: as `support_for`; or the platform would ignore the choice.
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
        # What is only known once the model is loaded is assumed to be the best that it may be.
        backend = chosen.get_class()
        support_for(
            LayerBackend(
                backend=_backend_name(backend),
                window=None if masks.block_causal else masks.canvas_length,
                non_causal=backend.supports_non_causal(),
                flash_version=FLASH_VERSION_WITH_CAUSAL_TENSOR,
            ),
            masks,
        )
    elif masks.window == "reference":
        raise ValueError(
            f"dllm.window=reference needs --attention-backend {OURS}: no other backend of this "
            "platform has one left edge for a whole canvas. Or use window=symmetric (the default, "
            "as vLLM does)"
        )


def _backend_name(backend: Any) -> str:
    """VLLM's name of a backend class; another party's ``CUSTOM`` gets its module's name added."""
    name: str = backend.get_name()
    ours = backend.__module__ == "vllm_dllm.attention.backend"
    return name if ours or name != OURS else f"{name} of {backend.__module__}"


def layer_backends(vllm_config: VllmConfig) -> list[LayerBackend]:
    """The different backends of the attention layers that vLLM made."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    backends: dict[LayerBackend, None] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        backend = layer.get_attn_backend()
        of_layer = LayerBackend(
            _backend_name(backend),
            layer.sliding_window,
            backend.supports_non_causal(),
            # Only FlashAttention's layers have versions.
            getattr(layer.impl, "vllm_flash_attn_version", None),
        )
        backends[of_layer] = None
    return list(backends)


def settle_support(vllm_config: VllmConfig, masks: ModelMasks) -> bool:
    """Settle how the layers of a loaded model express its masks, and log it in one line.

    Returns:
        Whether the layers have our backend, which wants a mask rule for each request.

    Raises:
        ValueError: as `support_for_all`.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layer_support = support_for_all(layer_backends(vllm_config), masks)
    logger.info("dllm: attention: %s", described(layer_support))
    methods = {support.method for _, support in layer_support}
    if "canvas rows" in methods:
        from vllm_dllm.cpu.reference_window import use_reference_window

        use_reference_window(get_layers_from_vllm_config(vllm_config, Attention))
    return "rules" in methods


def described(layer_support: Iterable[LayerSupport]) -> str:
    """The support of all layers, in one line for the log."""
    return "; ".join(
        f"{layers}: {support.method} ({support.reason})" for layers, support in layer_support
    )
