"""Derive the cases of a self-test from a `Machine`: the ways of serving that it has.

`attention.routes` says whether a way can be served, as it does for a server. There are hundreds of
combinations; `cases_of` chooses a few of them so that

- what a server does by default is a separate case;
- the backend that a family gets by default has every graph mode and every dtype;
- each other backend has its most captured graph mode, no graphs, and bfloat16;
- the kinds of kernels and of scheduling alternate; a float8 cache and the other window have one
  case each;
- SDAR, which shares its masks and kernels with LLaDA2, has a window of two blocks on every backend,
  and on one of them the two other ways to commit blocks.

A graph mode is tried in float32 if the backend supports it, because only then must tokens be equal;
otherwise (FlashAttention) it is tried in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from vllm_dllm.attention.backend_limits import candidates_of
from vllm_dllm.attention.route_parts import LayerShape, ModelAttention, Options, Route, RouteError
from vllm_dllm.attention.routes import choose_route, obstacle
from vllm_dllm.selftest.machine import Machine
from vllm_dllm.startup.commit_choice import GRANTED, SEPARATE, TWO_BLOCKS

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
DEFAULT = "default"  # whatever a server has by default
EAGER, COMPILED = "EAGER", "NONE"  # without compilation; compiled, without graphs
# vLLM's modes of CUDA graphs, its default first.
GRAPHS = ("FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", COMPILED, EAGER)
DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CUSTOM", "CPU_ATTN")
SCHEDULING = ("async", "sync")


@dataclass(frozen=True)
class Case:
    """One way of serving.

    Attributes:
        family: one of `FAMILIES`.
        backend: attention backend; `DEFAULT` leaves it to the server, as in all that follows.
        graphs: a mode of `GRAPHS`, or `DEFAULT`.
        kernels: ``dllm.kernels``, or `DEFAULT`.
        dtype: of the model.
        scheduling: ``async``, ``sync`` or `DEFAULT`.
        cache: dtype of the KV cache, ``auto`` for the model's.
        window: ``dllm.window``.
        flash: version of FlashAttention; None for other backends.
        fused_commit: ``dllm.fused_commit``, ``on``, ``off`` or `DEFAULT`.
    """

    family: str
    backend: str = DEFAULT
    graphs: str = DEFAULT
    kernels: str = DEFAULT
    dtype: str = "bfloat16"
    scheduling: str = DEFAULT
    cache: str = "auto"
    window: str = "symmetric"
    flash: int | None = None
    fused_commit: str = DEFAULT

    @property
    def name(self) -> str:
        """A short name, unique among the cases of a machine, which ``--only`` searches."""
        if self.backend == DEFAULT:
            return f"{self.family}/defaults"
        backend = f"{self.backend}-{self.flash}" if self.flash else self.backend
        words = [self.family, backend, self.graphs, self.kernels, self.dtype, self.scheduling]
        words += [f"cache-{self.cache}"] * (self.cache != "auto")
        words += [f"window-{self.window}"] * (self.window != "symmetric")
        words += [f"fused_commit-{self.fused_commit}"] * (self.fused_commit != DEFAULT)
        return "/".join(words)

    @property
    def commits(self) -> str:
        """How blocks must be committed, in `commit_choice`'s terms; `DEFAULT` if any way will do.

        ``on`` needs `scheduling`, which decides between two ways.
        """
        ways = {"async": TWO_BLOCKS, "sync": GRANTED}
        return {"on": ways.get(self.scheduling, DEFAULT), "off": SEPARATE}.get(
            self.fused_commit, DEFAULT
        )

    @property
    def exact(self) -> bool:
        """Whether tokens must equal the golden ones."""
        return self.dtype == "float32" and self.cache == "auto"

    def as_dict(self) -> dict[str, Any]:
        """The fields and the name, for JSON."""
        return {"name": self.name, **asdict(self)}


def cases_of(machine: Machine, *, every: bool = False) -> list[Case]:
    """The cases of a machine: first the defaults of servers, then each family's.

    Args:
        machine: the machine.
        every: whether to return all combinations, not the few that the module's docstring
            describes.
    """
    defaults = [_defaults(machine, family) for family in FAMILIES]
    for family in FAMILIES:
        few = _ways_to_commit if family == "sdar" else _few
        defaults += (_every if every else few)(machine, family)
    return defaults


def absent(machine: Machine) -> list[tuple[str, str]]:
    """What this machine lacks, as pairs of what cannot be tried here and why."""
    found = []
    if machine.is_cpu:
        found.append(("CUDA graphs", "the CPU platform has none"))
    if not machine.device.triton:
        found.append(("kernels triton", "vLLM has no Triton here"))
    for family, backend in product(FAMILIES, BACKENDS):
        why = obstacle(backend, machine.device, ATTENTION[family], Options())
        if why is not None:
            found.append((f"{family}, {backend}", why))
    if not machine.bfloat16:
        found.append(("bfloat16", "it needs compute capability 8.0"))
    if not machine.fp8_cache:
        found.append(("cache fp8", "this device has no float8 keys and values"))
    return found


def route_of(machine: Machine, case: Case) -> Route | None:
    """The route of a case on a machine; None if the machine cannot serve the case."""
    attention = replace(ATTENTION[case.family], dtype=case.dtype, window=case.window)
    graphs = None if machine.is_cpu or case.graphs in (DEFAULT, EAGER) else case.graphs
    asked = Options(
        backend=None if case.backend == DEFAULT else case.backend,
        kv_cache_dtype=case.cache,
        graphs=graphs,
        flash_version=case.flash,
    )
    try:
        route = choose_route(machine.device, attention, asked)
    except RouteError:
        return None
    as_asked = graphs in (None, route.graphs) and case.flash in (None, route.flash_version)
    here = (machine.fp8_cache or case.cache == "auto") and (
        machine.bfloat16 or case.dtype != "bfloat16"
    )
    # No kernel supports a float8 cache, which vLLM keeps as bytes, with float32 queries.
    sensible = case.cache == "auto" or case.dtype != "float32"
    return route if as_asked and here and sensible else None


def _backends(machine: Machine, family: str) -> list[tuple[str, int | None]]:
    """(backend, version of FlashAttention) pairs that can serve a family, the default first."""
    versions = sorted(machine.device.flash_versions, reverse=True)
    asked = [
        (backend, version)
        for backend in candidates_of(machine.device)
        for version in (versions if backend == "FLASH_ATTN" else [None])
    ]
    return [
        (backend, version)
        for backend, version in asked
        if route_of(machine, replace(_defaults(machine, family), backend=backend, flash=version))
    ]


def _defaults(machine: Machine, family: str) -> Case:
    """What a server has by default, in the dtype that the checkpoints get on the machine."""
    return Case(family, dtype="bfloat16" if machine.bfloat16 else "float16")


def _few(machine: Machine, family: str) -> Iterator[Case]:
    kernels = _kernels(machine)
    for rank, (backend, version) in enumerate(_backends(machine, family)):
        base = replace(_defaults(machine, family), backend=backend, flash=version)

        def case(number: int, _base: Case = base, **fields: Any) -> Case:
            turn = {"kernels": kernels[number % len(kernels)], "scheduling": SCHEDULING[number % 2]}
            return replace(_base, **(turn | fields))

        dtypes = [
            dtype for dtype in DTYPES if route_of(machine, replace(base, dtype=dtype)) is not None
        ]
        modes = _modes(machine, replace(base, dtype=dtypes[0]))
        tried = modes if rank == 0 else list(dict.fromkeys((modes[0], modes[-1])))
        if len(tried) == 1:
            tried *= 2  # a single mode is tried with both kinds of scheduling
        for number, graphs in enumerate(tried):
            yield case(number, graphs=graphs, dtype=dtypes[0])
        for number, dtype in enumerate(dtypes[1:] if rank == 0 else dtypes[1:2]):
            yield case(number + 1, graphs=modes[0], dtype=dtype)
    for cache, window in (("fp8", "symmetric"), ("auto", "reference")):
        if window == "reference" and family != "diffusion_gemma":
            continue
        dtype = "bfloat16" if cache == "fp8" else "float32"
        asked = Case(family, dtype=dtype, cache=cache, window=window)
        route = route_of(machine, asked)
        if route is not None:
            chosen = replace(asked, backend=route.backend, flash=route.flash_version)
            mode = _modes(machine, chosen)[0]
            yield replace(chosen, graphs=mode, kernels=kernels[0], scheduling="async")


def _ways_to_commit(machine: Machine, family: str) -> Iterator[Case]:
    """A window of two blocks on each backend, and all ways on the first that compares tokens."""
    kernels, seen, compared = _kernels(machine), set[str](), False
    for backend, version in _backends(machine, family):
        if backend in seen:
            continue  # an older FlashAttention, which LLaDA2's cases cover
        base = replace(_defaults(machine, family), backend=backend, flash=version)
        base = next(
            case
            for case in (replace(base, dtype=dtype) for dtype in DTYPES)
            if route_of(machine, case) is not None
        )
        modes = _modes(machine, base)
        turn = kernels[len(seen) % len(kernels)]
        base = replace(base, graphs=modes[0], kernels=turn, scheduling="async")
        yield replace(base, fused_commit="on")
        if base.exact and not compared:
            compared = True
            yield replace(base, graphs=modes[-1], fused_commit="off")
            yield replace(base, kernels=kernels[-1], scheduling="sync")
        seen.add(backend)


def _modes(machine: Machine, case: Case) -> list[str]:
    """The graph modes that a case may have, the most captured first."""
    if machine.is_cpu:
        # Compilation takes most of a minute on a CPU; the case of a server's defaults covers it.
        return [EAGER]
    return [mode for mode in GRAPHS if route_of(machine, replace(case, graphs=mode)) is not None]


def _every(machine: Machine, family: str) -> Iterator[Case]:
    graphs = (COMPILED, EAGER) if machine.is_cpu else GRAPHS
    windows = ("symmetric", "reference") if family == "diffusion_gemma" else ("symmetric",)
    commits = ("on", "off") if ATTENTION[family].block_causal else (DEFAULT,)
    backends = product(_backends(machine, family), commits)
    rest = (graphs, _kernels(machine), DTYPES, SCHEDULING, ("auto", "fp8"), windows)
    for ((backend, version), fused), fields in product(backends, product(*rest)):
        case = Case(family, backend, *fields, flash=version, fused_commit=fused)
        if route_of(machine, case) is not None:
            yield case


def _kernels(machine: Machine) -> tuple[str, ...]:
    return ("torch", "triton") if machine.device.triton else ("torch",)
