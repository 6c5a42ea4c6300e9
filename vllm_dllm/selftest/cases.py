"""The cases of a self-test: the ways of serving that a machine has.

`attention.routes` says whether a case can be served, as it does for a server. Tokens are compared
exactly in float32 only, so most cases are in float32 where the backend has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_dllm.attention.routes import (
    Device,
    LayerShape,
    ModelAttention,
    Options,
    Route,
    RouteError,
    candidates_of,
    choose_route,
    obstacle,
)

# Family -> the folder of its tiny checkpoint, and the attention that it needs.
FAMILIES = {
    "llada2": "tiny-llada2",
    "diffusion_gemma": "tiny-diffusiongemma",
    "sdar": "tiny-sdar",
}
ATTENTION = {
    "llada2": ModelAttention(True, 32, (LayerShape(32),)),
    "sdar": ModelAttention(True, 4, (LayerShape(32),)),
    "diffusion_gemma": ModelAttention(False, 32, (LayerShape(32, 128), LayerShape(64))),
}
DEFAULT = "default"  # what a server chooses
EAGER, COMPILED = "EAGER", "NONE"  # without compilation; compiled, without CUDA graphs
GRAPHS = "FULL_AND_PIECEWISE"  # vLLM's default


@dataclass(frozen=True)
class Case:
    """One way of serving. `DEFAULT` leaves a field to the server."""

    family: str  # one of `FAMILIES`
    backend: str = DEFAULT  # of attention
    graphs: str = DEFAULT  # vLLM's mode of CUDA graphs, or `EAGER`
    kernels: str = DEFAULT  # ``dllm.kernels``
    dtype: str = "bfloat16"  # of the model
    scheduling: str = DEFAULT  # ``async`` or ``sync``
    cache: str = "auto"  # dtype of the KV cache, ``auto`` for the model's
    window: str = "symmetric"  # ``dllm.window``
    flash: int | None = None  # version of FlashAttention; None for other backends
    fused_commit: str = DEFAULT  # ``dllm.fused_commit``

    @property
    def name(self) -> str:
        """A short name, unique among the cases of a machine, which ``--only`` searches."""
        if self == Case(self.family, dtype=self.dtype):
            return f"{self.family}/defaults"
        backend = f"{self.backend}-{self.flash}" if self.flash else self.backend
        words = [self.family, backend, self.graphs, self.kernels, self.dtype, self.scheduling]
        words += [f"cache-{self.cache}"] * (self.cache != "auto")
        words += [f"window-{self.window}"] * (self.window != "symmetric")
        words += [f"fused_commit-{self.fused_commit}"] * (self.fused_commit != DEFAULT)
        return "/".join(words)

    @property
    def exact(self) -> bool:
        """Whether tokens must equal the golden ones."""
        return self.dtype == "float32" and self.cache == "auto"


# graphs, kernels, dtype, scheduling, fused_commit
Row = tuple[str, str, str, str, str]
ON_EACH_BACKEND: tuple[Row, ...] = (
    (GRAPHS, "triton", "float32", "async", DEFAULT),
    (EAGER, "torch", "float32", "sync", DEFAULT),
    (GRAPHS, "torch", "bfloat16", "sync", DEFAULT),
)
# Also on the backend that the family gets by default.
ON_THE_DEFAULT_BACKEND: tuple[Row, ...] = (
    ("FULL", "torch", "float32", "async", DEFAULT),
    ("FULL_DECODE_ONLY", "triton", "float32", "sync", DEFAULT),
    ("PIECEWISE", "torch", "float32", "async", DEFAULT),
    (COMPILED, "triton", "float32", "sync", DEFAULT),
    (GRAPHS, "triton", "float16", "async", DEFAULT),
)
# SDAR shares its masks and kernels with LLaDA2, so each backend is tried only with its three ways
# to commit blocks: in a window of two blocks, separately, and as the scheduler grants it.
OF_SDAR: tuple[Row, ...] = (
    (GRAPHS, "triton", "float32", "async", "on"),
    (EAGER, "torch", "float32", "async", "off"),
    (GRAPHS, "torch", "float32", "sync", "on"),
)


def cases_of(device: Device, fp8_cache: bool = False, old_compiler: bool = False) -> list[Case]:
    """The cases of a machine, a server's defaults first.

    `fp8_cache` says whether the device has float8 keys and values, and `old_compiler` whether this
    PyTorch's compiler multiplies indices by constants of 64 bits in 32, so that compiled functions
    without Triton kernels of ours do not start on a GPU.
    """
    asked = [Case(family) for family in FAMILIES]
    if fp8_cache:
        asked += [
            Case(family, graphs=GRAPHS, cache="fp8") for family in FAMILIES if family != "sdar"
        ]
    asked.append(Case("diffusion_gemma", graphs=GRAPHS, dtype="float32", window="reference"))
    for family in FAMILIES:
        asked += _on_each_backend(device, family)
    fitted = list(dict.fromkeys(_fitted(device, case) for case in asked))
    if old_compiler and device.platform != "cpu":
        fitted = [one for one in fitted if one.kernels != "torch" or one.graphs == EAGER]
    return [one for one in fitted if route_of(device, one) is not None]


def _on_each_backend(device: Device, family: str) -> Iterator[Case]:
    default = route_of(device, Case(family))
    for backend in candidates_of(device):
        flash = backend == "FLASH_ATTN"
        for version in sorted(device.flash_versions, reverse=True) if flash else [None]:
            rows = OF_SDAR if family == "sdar" else ON_EACH_BACKEND
            is_default = default and (backend, version) == (default.backend, default.flash_version)
            if is_default and family != "sdar":
                rows += ON_THE_DEFAULT_BACKEND
            for graphs, kernels, dtype, scheduling, fused in rows:
                case = Case(family, backend, graphs, kernels, dtype, scheduling)
                yield replace(case, flash=version, fused_commit=fused)


def _fitted(device: Device, case: Case) -> Case:
    """A case, with the nearest that the machine has in the place of what it lacks."""
    if device.platform == "cpu" and case.graphs != DEFAULT:
        # Compilation takes most of a minute on a CPU; the case of a server's defaults covers it.
        case = replace(case, graphs=EAGER)
    if not device.triton and case.kernels == "triton":
        case = replace(case, kernels="torch")
    if case.dtype == "float32" and route_of(device, case) is None:  # FlashAttention has none
        case = replace(case, dtype="bfloat16")
    if case.dtype == "bfloat16" and device.capability and device.capability < (8, 0):
        case = replace(case, dtype="float16")
    return case


def route_of(device: Device, case: Case) -> Route | None:
    """The route of a case; None if the machine cannot serve the case as it asks."""
    attention = replace(ATTENTION[case.family], dtype=case.dtype, window=case.window)
    asked = Options(
        backend=None if case.backend == DEFAULT else case.backend,
        kv_cache_dtype=case.cache,
        flash_version=case.flash,
    )
    try:
        route = choose_route(device, attention, asked)
    except RouteError:
        return None
    # A graph of mode FULL also replays mixed batches, and vLLM lowers the mode for most backends.
    replays = (route.backend, route.method) == ("TRITON_ATTN", "causal tensor")
    as_asked = replays or case.graphs != "FULL"
    return route if as_asked and case.flash in (None, route.flash_version) else None


def absent(device: Device, old_compiler: bool = False) -> list[tuple[str, str]]:
    """List what this machine cannot run: families with a backend, and kernels, with reasons."""
    found = []
    if old_compiler and device.platform != "cpu":
        reason = "this PyTorch's compiler computes indices in too few bits; use 2.13 or later"
        found.append(("kernels: torch, compiled", reason))
    for family, attention in ATTENTION.items():
        for backend in ("FLASH_ATTN", "TRITON_ATTN", "CUSTOM", "CPU_ATTN"):
            why = obstacle(backend, device, attention, Options())
            if why is not None:
                found.append((f"{family}, {backend}", why))
    return found
