"""What a steady step of DiffusionGemma costs at its published sizes, printed as JSON.

    python -m tests.support.children.head_child '[["torch", 1, false], ["triton", 16, true], ...]'

One line for each choice of kernels, number of requests, and whether the sampler is compiled: the
kernels that are launched, by the file that launches them, and the most bytes that temporaries of
the readout take. A launch of one of this package's Triton kernels counts in place of the kernel,
which is not run. A compiled function counts as the kernels that PyTorch's compiler generates.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.children.fake_steps import FakeModel, diffusion_gemma
from tests.support.fake_accelerator import (
    NAME,
    Cost,
    Launched,
    fake_accelerator,
    only_count_launches,
)
from tests.support.generated_kernels import generated_kernels
from vllm_dllm.engine import readout_noise, sampler, step
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.ops.statistics import soft_embedding_triton
from vllm_dllm.ops.statistics import tiled as tiled_statistics
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

COMPILING = (step, sampler, soft_embedding_triton, readout_noise, tiled_statistics)
# From a function to what is called in its place, like `compiled`.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Peak(TorchDispatchMode):
    """Bytes of the tensors of the fake device that are made while it is entered.

    Attributes:
        now, most: bytes alive at this moment, and at the worst one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for leaf in tensors(result):
            storage = leaf.untyped_storage()
            key = storage._cdata
            if leaf.device.type == NAME and key not in given | self.alive:
                self.alive.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def prepare(model: FakeModel, kernels: str, requests: int, compiler: Compiler | None) -> None:
    """Choose the kernels, let `compiler` compile, and admit requests."""
    if compiler is not None:
        for module in COMPILING:
            module.compiled = compiler  # type: ignore[attr-defined]
        model.sampler.canvas_update.compiled_algorithm = "EntropyBound"
    fused = soft_embedding_triton.fused_statistics
    statistics = fused if kernels == "triton" else tiled_statistics.tiled_statistics
    readout = readout_noise.NoiseReadout(
        model.readout.head, model.slots, model.parts, compiler is not None, statistics
    )
    model.readout = model.sampler.readout = readout
    for slot in range(requests):
        model.admit(slot)


@cache
def generated(kernels: str, requests: int) -> dict[str, int]:
    """Kernels of each function that a step compiles, by name.

    Counted in a step of a small model on the CPU, whose canvases have the published length.
    """
    found: dict[str, int] = {}

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found[function.__name__] = len(generated_kernels(function, *args))
            return function(*args)

        return run

    served = Served("uniform", "EntropyBound", DllmSettings(), {}, 256, None, None)
    kind = CanvasKind(256, 320, None, aligned=False)
    with torch.inference_mode():
        model = FakeModel(served, kind, 64, torch.device("cpu"))
        model.weight.zero_()
        prepare(model, kernels, requests, compiler)
        batch = model.batch(requests)
        batch.idx_mapping = torch.arange(requests)  # which is left empty for a fake step
        model.sampler(torch.zeros(batch.num_draft_tokens, model.hidden).bfloat16(), batch)
    return found


def measured(kernels: str, requests: int, compiles: bool) -> dict[str, Any]:
    counts = generated(kernels, min(requests, 2)) if compiles else {}
    Launched.counts.clear()
    costs: list[Cost] = []

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before = [cost.kernels.copy() for cost in costs]
            result = function(*args)
            for cost, kernels in zip(costs, before, strict=True):
                cost.kernels = kernels
                cost.kernels[f"compiled {function.__name__}"] += counts[function.__name__]
            return result

        return run

    with fake_accelerator() as device:
        model = diffusion_gemma(device)
        prepare(model, kernels, requests, compiler if compiles else None)
        batch = model.batch(requests)
        with Cost() as cost:
            costs.append(cost)
            model.step(batch)
        costs.clear()
        launched = dict(Launched.counts)
        read, peaks = model.readout.read, []

        def watched(*args: Any) -> Any:
            with Peak() as peak:
                readings = read(*args)
            peaks.append((peak.most, peak.now))
            return readings

        model.readout.read = watched
        model.step(batch)
    ((most, left),) = peaks
    return {
        "kernels": sum(cost.kernels.values()),
        "launched": launched,
        "by_file": cost.summary()["kernels"],
        "peak": most,
        "result": left,
    }


def main() -> None:
    only_count_launches()
    for kernels, requests, compiles in json.loads(sys.argv[1]):
        print(json.dumps(measured(kernels, requests, compiles)), flush=True)


if __name__ == "__main__":
    main()
