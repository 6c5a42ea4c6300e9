"""Copies from the host to the device without waiting.

Copying ordinary memory to a GPU always waits until the GPU has finished all earlier work. A copy
from pinned memory does not wait, and torch reuses pinned memory only after the copies from it are
done.
"""

from __future__ import annotations

import numpy as np
import torch


def can_pin(device: torch.device) -> bool:
    """Whether copies to and from this device use pinned memory."""
    return device.type not in ("cpu", "meta")


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an array or tensor from the host to the device, without waiting for the device.

    On the CPU this is the same memory, so the caller must not write to `values` afterwards.
    """
    return _on_host(values, device).to(device, non_blocking=True)


def copy_into(target: torch.Tensor, values: np.ndarray | torch.Tensor) -> None:
    """The same into a contiguous tensor of that dtype, which is one copy and no kernel."""
    target.copy_(_on_host(values, target.device), non_blocking=True)


def _on_host(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    host = torch.as_tensor(values)
    return host.pin_memory() if can_pin(device) else host
