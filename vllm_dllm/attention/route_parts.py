"""The inputs from which a route is chosen, and the route itself. See `attention.routes`."""

from __future__ import annotations

from dataclasses import dataclass


class RouteError(ValueError):
    """No route can do what was asked for; the message names the option and the remedy."""


@dataclass(frozen=True)
class Device:
    """The device that attention runs on.

    Attributes:
        platform: ``cuda``, ``rocm``, ``cpu``, or another of vLLM's names.
        capability: the compute capability (major, minor) of a CUDA device.
        triton: whether vLLM can use Triton.
        flash_versions: the versions of FlashAttention that vLLM can use here.
    """

    platform: str
    capability: tuple[int, int] | None = None
    triton: bool = True
    flash_versions: frozenset[int] = frozenset()

    @property
    def major(self) -> int:
        """The major number of the compute capability; 0 if there is none."""
        return self.capability[0] if self.capability else 0

    def __str__(self) -> str:
        if self.capability:
            return "SM{}{}".format(*self.capability)
        return {"cpu": "the CPU platform", "rocm": "ROCm"}.get(self.platform, self.platform)


@dataclass(frozen=True)
class LayerShape:
    """The properties by which attention layers differ.

    Attributes:
        head_size: size of a head.
        window: W of the layers' sliding window, or None.
    """

    head_size: int
    window: int | None = None

    def __str__(self) -> str:
        return "sliding-window layers" if self.window else "global layers"


@dataclass(frozen=True)
class ModelAttention:
    """The attention that a model needs.

    Attributes:
        block_causal: whether prompts and canvases are block-causal (LLaDA2); otherwise prompts are
            causal and canvases bidirectional (DiffusionGemma).
        canvas_length: L, tokens of a canvas.
        layers: the different shapes of its attention layers.
        window: ``dllm.window``, how a canvas sees sliding-window layers.
        dtype: the dtype of queries, without ``torch.``.
    """

    block_causal: bool
    canvas_length: int
    layers: tuple[LayerShape, ...]
    window: str = "symmetric"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Options:
    """The options that the user set; None for those left unset.

    Attributes:
        backend: ``--attention-backend``.
        kv_cache_dtype: ``--kv-cache-dtype``.
        graphs: ``cudagraph_mode``, by name.
        page_size: ``--block-size``.
        flash_version: ``--attention-config.flash_attn_version``.
    """

    backend: str | None = None
    kv_cache_dtype: str = "auto"
    graphs: str | None = None
    page_size: int | None = None
    flash_version: int | None = None


@dataclass(frozen=True)
class Route:
    """How a model's masks are computed.

    Attributes:
        backend: vLLM's name of the attention backend, for all layers.
        flash_version: the version of FlashAttention, or None for other backends.
        method: one of the four that the docstring of `attention.routes` lists.
        graphs: the CUDA graph mode: the requested one, vLLM's default, or the next lower one that
            is correct for the method.
        page_size: the number of tokens in a KV cache page, or None if vLLM's choice is as good.
        reason: the reason for this route, in words.
    """

    backend: str
    flash_version: int | None
    method: str
    graphs: str
    page_size: int | None
    reason: str

    def __str__(self) -> str:
        """The route in one line, for the log."""
        version = f" (FlashAttention {self.flash_version})" if self.flash_version else ""
        pages = f", KV pages of {self.page_size} tokens" if self.page_size else ""
        return f"{self.backend}{version}, {self.method}, CUDA graphs {self.graphs}{pages}: " + (
            self.reason
        )
