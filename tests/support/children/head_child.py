"""What a steady step of DiffusionGemma costs at its published sizes, printed as JSON.

    python -m tests.support.children.head_child '[["torch", 1], ["triton", 16], ...]'

One line for each choice of kernels and number of requests: the kernels that are launched, counted
as `fake_steps` does, and the most bytes that temporaries of the readout take.
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.children.fake_steps import MODELS, FakeModel, Launches, generated
from tests.support.fake_accelerator import NAME, Cost, fake_accelerator

MODEL = "DiffusionGemma"


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
    on_gpu = kernels == "triton"
    with (
        Launches(generated(MODEL) if on_gpu else {}) as launches,
        fake_accelerator() as device,
    ):
        model = FakeModel(MODELS[MODEL], device, on_gpu)
        for slot in range(requests):
            model.admit(slot)
        batch = model.batch(requests)
        with Cost() as cost:
            model.step(batch)
        launched = dict(launches.counts)
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
        "kernels": sum(cost.kernels.values()) + sum(launched.values()),
        "launched": launched,
        "by_file": cost.summary()["kernels"],
        "peak": most,
        "result": left,
    }


def main() -> None:
    for kernels, requests in json.loads(sys.argv[1]):
        print(json.dumps(measured(kernels, requests)), flush=True)


if __name__ == "__main__":
    main()
