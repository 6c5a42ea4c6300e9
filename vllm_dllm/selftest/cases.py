"""Which ways of serving a machine has: from `Machine` to the cases of a self-test.

A machine has some *paths* for each family: an attention backend, with the graph modes and the
types that it takes. One case would be needed for each combination; `cases_of` chooses few of them
so that

- the first path of a family, which is what vLLM takes by itself, has every graph mode, dtype, kind
  of kernels, scheduling and cache dtype;
- every other path has its most and its least captured graph mode, and both kinds of dtypes;
- what a server has if nobody asks for anything is a case of its own.

A graph mode is tried in float32 where the backend takes it, because only there tokens must be
equal; where it does not (FlashAttention), in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from vllm_dllm.selftest.machine import CPU, CUDA, ROCM, Machine

# Family -> the folder of its tiny checkpoint.
FAMILIES = {"llada2": "tiny-llada2", "diffusion_gemma": "tiny-diffusiongemma"}
DEFAULT = "default"  # whatever a server has if nobody asks
EAGER, COMPILED = "EAGER", "NONE"  # without compilation; compiled, without graphs
# vLLM's modes of CUDA graphs, its default first.
GRAPHS = ("FULL_AND_PIECEWISE", COMPILED, "PIECEWISE", "FULL_DECODE_ONLY", EAGER)
WIDE = ("float32", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
NO_GRAPHS = (EAGER, COMPILED)


@dataclass(frozen=True)
class Path:
    """An attention backend of a machine, and what it can be combined with.

    Attributes:
        backend: vLLM's name of it.
        graphs: graph modes, the one that vLLM takes by itself first.
        dtypes: of the model, the most exact first.
        flash: version of FlashAttention; None for other backends.
    """

    backend: str
    graphs: tuple[str, ...] = GRAPHS
    dtypes: tuple[str, ...] = WIDE
    flash: int | None = None


@dataclass(frozen=True)
class Case:
    """One way of serving.

    Attributes:
        family: one of `FAMILIES`.
        backend: attention backend; `DEFAULT` leaves it to vLLM, as in all that follows.
        graphs: a mode of `GRAPHS`, or `DEFAULT`.
        kernels: ``dllm.kernels``, or `DEFAULT`.
        dtype: of the model.
        scheduling: ``async``, ``sync`` or `DEFAULT`.
        cache: dtype of the KV cache, ``auto`` for the model's.
        window: ``dllm.window``.
        flash: version of FlashAttention; None for other backends.
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

    @property
    def name(self) -> str:
        """Short and unique among the cases of a machine; what ``--only`` looks into."""
        if self.backend == DEFAULT:
            return f"{self.family}/defaults"
        backend = f"{self.backend}{self.flash or ''}"
        words = [self.family, backend, self.graphs, self.kernels, self.dtype, self.scheduling]
        words += [f"cache-{self.cache}"] * (self.cache != "auto")
        words += [f"window-{self.window}"] * (self.window != "symmetric")
        return "/".join(words)

    @property
    def exact(self) -> bool:
        """Whether tokens must equal the golden ones."""
        return self.dtype == "float32" and self.cache == "auto"

    def as_dict(self) -> dict[str, Any]:
        """Its fields and its name, for JSON."""
        return {"name": self.name, **asdict(self)}


def paths_of(machine: Machine, family: str) -> list[Path]:
    """The paths that a machine has for a family, the one that vLLM takes by itself first."""
    if machine.platform == CPU:
        own = [Path("CUSTOM", NO_GRAPHS)] if machine.triton else []
        return [Path("CPU_ATTN", (EAGER, COMPILED)), *own]
    found = [Path("TRITON_ATTN"), Path("CUSTOM")] if machine.triton else []
    if machine.platform != CUDA:
        return found
    flash = [
        Path("FLASH_ATTN", dtypes=HALF, flash=version)
        for version in reversed(machine.flash_attention)
        if family == "llada2" or (version == 4 and machine.capability == (9, 0))
    ]
    return [*flash, *found]


def cases_of(machine: Machine, *, every: bool = False) -> list[Case]:
    """The cases of a machine, family by family.

    Args:
        machine: what it has.
        every: all combinations, and not the few that the module's docstring describes.
    """
    choose = _every if every else _few
    return [case for family in FAMILIES for case in choose(machine, family)]


def absent(machine: Machine) -> list[tuple[str, str]]:
    """What this machine lacks: (what cannot be tried here, why)."""
    found = []
    gpu = machine.platform in (CUDA, ROCM)
    if not gpu:
        found.append(("CUDA graphs", "no GPU that vLLM supports"))
    if not machine.triton:
        found += [(what, "vLLM has no Triton here") for what in ("CUSTOM", "kernels triton")]
    if machine.platform != CPU:
        found.append(("CPU_ATTN", "vLLM's CPU platform only"))
    paths = {family: paths_of(machine, family) for family in FAMILIES}
    for backend in ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"):
        for family, has in paths.items():
            if backend not in [path.backend for path in has]:
                found.append((f"{family}, {backend}", _reason(machine, family, backend)))
    if not machine.fp8_cache:
        found.append(("cache fp8", "no float8 keys and values on this device"))
    return found


def _reason(machine: Machine, family: str, backend: str) -> str:
    if backend == "TRITON_ATTN":
        return "a GPU's backend, and it needs Triton"
    if machine.platform != CUDA:
        return "a backend of NVIDIA's GPUs"
    if backend == "FLASHINFER":
        return "its buffers have no room for a prompt's blocks"
    if family == "llada2" or not machine.flash_attention:
        return "vLLM has no FlashAttention here"
    return "needs FlashAttention 4 on a GPU of compute capability 9.0"


def _few(machine: Machine, family: str) -> Iterator[Case]:
    yield Case(family)
    kernels = _kernels(machine)
    for rank, path in enumerate(paths_of(machine, family)):
        first = rank == 0
        modes = path.graphs if first else dict.fromkeys((path.graphs[0], path.graphs[-1]))
        mode = path.graphs[-1] if machine.platform == CPU else path.graphs[0]
        if machine.platform == CPU and path.backend == "CPU_ATTN":
            # Compilation takes most of a minute on a CPU, and the defaults have it.
            modes, mode = (EAGER, EAGER), EAGER

        def case(number: int, _path: Path = path, **fields: Any) -> Case:
            turn = {
                "kernels": kernels[number % len(kernels)],
                "scheduling": ("async", "sync")[number % 2],
            }
            return Case(family, _path.backend, flash=_path.flash, **(turn | fields))

        for number, graphs in enumerate(modes):
            yield case(number, graphs=graphs, dtype=path.dtypes[0])
        for number, dtype in enumerate(path.dtypes[1:] if first else path.dtypes[1:2]):
            yield case(number, graphs=mode, dtype=dtype)
        if first and machine.fp8_cache:
            yield case(0, graphs=mode, dtype="bfloat16", cache="fp8")
        if family == "diffusion_gemma" and path.backend in ("CPU_ATTN", "CUSTOM"):
            yield case(1, graphs=mode, dtype="float32", window="reference")


def _every(machine: Machine, family: str) -> Iterator[Case]:
    yield Case(family)
    caches = ("auto", "fp8") if machine.fp8_cache else ("auto",)
    for path in paths_of(machine, family):
        has_reference = family == "diffusion_gemma" and path.backend in ("CPU_ATTN", "CUSTOM")
        windows = ("symmetric", "reference") if has_reference else ("symmetric",)
        for graphs, kernels, dtype, scheduling, cache, window in product(
            path.graphs, _kernels(machine), path.dtypes, ("async", "sync"), caches, windows
        ):
            if cache == "fp8" and dtype == "float32":
                continue
            yield Case(
                family, path.backend, graphs, kernels, dtype, scheduling, cache, window, path.flash
            )


def _kernels(machine: Machine) -> tuple[str, ...]:
    return ("torch", "triton") if machine.triton else ("torch",)
