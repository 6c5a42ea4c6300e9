"""Find out what a machine has that decides which ways of serving can be tried there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm_dllm.attention.route_parts import Device

CPU = "cpu"


@dataclass(frozen=True)
class Machine:
    """A machine, as vLLM sees it.

    Attributes:
        device: the device that attention runs on.
        name: the name of the device.
        fp8_cache: whether the device has float8 keys and values, whatever the backend.
        cores: processor cores of the host that this process may use.
        memory: free bytes of the device; for a CPU, of the host.
    """

    device: Device
    name: str = ""
    fp8_cache: bool = False
    cores: int = 1
    memory: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether vLLM's CPU platform serves."""
        return self.device.platform == CPU

    @property
    def bfloat16(self) -> bool:
        """Whether vLLM computes in bfloat16 here."""
        capability = self.device.capability
        return capability is None or capability >= (8, 0)

    def as_dict(self) -> dict[str, Any]:
        """The machine's fields, for JSON."""
        device = self.device
        return {
            "platform": device.platform,
            "name": self.name,
            "capability": device.capability,
            "flash_attention": sorted(device.flash_versions),
            "triton": device.triton,
            "fp8_cache": self.fp8_cache,
            "cores": self.cores,
            "memory": self.memory,
        }


def this_machine() -> Machine:
    """The machine that this process runs on; nothing is allocated on a device."""
    import torch
    from vllm.platforms import current_platform

    from vllm_dllm.attention.served_route import device_here

    device = device_here()
    if device.platform == CPU:
        # vLLM's CPU attention reads float8 caches only with these instructions.
        fp8_cache = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_supported()
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        fp8_cache = current_platform.supports_fp8()
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return Machine(
        device=device,
        name=_processor() if device.platform == CPU else current_platform.get_device_name(),
        fp8_cache=bool(fp8_cache),
        cores=len(os.sched_getaffinity(0)),
        memory=free,
    )


def _processor() -> str:
    """The processor's name; vLLM's CPU platform has none."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, CPU)
