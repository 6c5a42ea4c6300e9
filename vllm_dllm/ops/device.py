"""Device properties on which kernel launches depend."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU.

    It is 4 on other devices, where kernels are interpreted, so that work is split there too.
    """
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
