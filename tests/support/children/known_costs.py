"""What the fake accelerator counts for lines whose costs on a GPU are known, printed as JSON.

python -m tests.support.children.known_costs
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch

from tests.support.fake_accelerator import Cost, fake_accelerator
from vllm_dllm.engine.to_device import to_device


def main() -> None:
    """One line: a list of (name, kernels, copies that go on, waits)."""
    found = []
    with fake_accelerator() as device:
        x = torch.zeros(4, device=device)
        mask, index = x > 0, torch.zeros(1, dtype=torch.int64, device=device)
        host, pinned = torch.zeros(4), torch.zeros(4, pin_memory=True)
        lines: dict[str, Callable[[], object]] = {
            "a view": lambda: x[1:3].view(2, 1),
            "a kernel": lambda: x.add_(1),
            "fill_": lambda: x[0].fill_(1),
            "to_device": lambda: to_device(np.arange(3), device),
            "unpinned": lambda: host.to(device, non_blocking=True),
            "pinned, but waits": lambda: x.copy_(pinned),
            "pinned": lambda: x.copy_(pinned, non_blocking=True),
            "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
            "to the host": lambda: x.cpu(),
            "a list": lambda: torch.tensor([1, 2], device=device),
            "item": lambda: x.sum().item(),
            "if": lambda: 1 if x.any() else 0,
            "tolist": lambda: x.tolist(),
            "a number into a place": lambda: x.__setitem__(0, 1.0),
            "a number into a slice": lambda: x.__setitem__(slice(2), 1.0),
            "a number into indices": lambda: x.__setitem__(index, 1.0),
            "a tensor into a mask": lambda: x.__setitem__(mask, x[0]),
            "repeats of known length": lambda: x.repeat_interleave(index.expand(4), output_size=4),
        }
        for name, line in lines.items():
            with Cost() as cost:
                line()
            late = sum(copy.waits for copy in cost.copies) + len(cost.waits)
            in_time = len(cost.copies) - sum(copy.waits for copy in cost.copies)
            found.append([name, sum(cost.kernels.values()), in_time, late])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
