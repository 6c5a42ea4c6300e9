"""What launches of kernels must know of a device."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 where kernels are interpreted, so that work is split there, too."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
