"""What a steady step of DiffusionGemma costs at its published sizes, printed as JSON.

    python -m tests.cuda_paths.head_child '[["torch", 1], ["triton", 16], ...]'

One line for each pair of kernels and number of requests: the kernels that are launched, by the file
that launches them, and the most bytes that temporaries take. A launch of one of this package's
Triton kernels is counted in place of the kernel, which is not run.
"""

from __future__ import annotations

import importlib
import json
import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_accelerator import NAME, Cost, fake_accelerator
from tests.support.fake_steps import diffusion_gemma

LAUNCHERS = ("head_triton", "soft_embedding_triton", "rows_triton")


class Launched:
    """Stands in for a Triton kernel."""

    counts: Counter[str] = Counter()

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.counts.update([self.name])


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


def measured(kernels: str, requests: int) -> dict[str, Any]:
    Launched.counts.clear()
    with fake_accelerator() as device:
        model = diffusion_gemma(device)
        if kernels == "triton":
            from vllm_dllm.worker.readout.triton import TritonTiledReadout

            readout = TritonTiledReadout(model.readout.head, model.slots, model.reports)
            model.readout = model.sampler.readout = readout
        for slot in range(requests):
            model.admit(slot)
        with Cost() as cost:
            model.step(requests)
        launched = dict(Launched.counts)
        read, peaks = model.readout.read, []

        def watched(*args: Any) -> Any:
            with Peak() as peak:
                readings = read(*args)
            peaks.append((peak.most, peak.now))
            return readings

        model.readout.read = watched
        model.step(requests)
    ((most, left),) = peaks
    return {
        "kernels": sum(cost.kernels.values()) + sum(launched.values()),
        "launched": launched,
        "by_file": cost.summary()["kernels"],
        "peak": most,
        "result": left,
    }


def main() -> None:
    for name in LAUNCHERS:
        module = importlib.import_module(f"vllm_dllm.ops.statistics.{name}")
        for kernel in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, kernel, Launched(kernel))
    for kernels, requests in json.loads(sys.argv[1]):
        print(json.dumps(measured(kernels, requests)), flush=True)


if __name__ == "__main__":
    main()
