"""What a machine has, as far as it decides which ways of serving can be tried there."""

from __future__ import annotations

import os
from dataclasses import dataclass

CPU, CUDA, ROCM = "cpu", "cuda", "rocm"


@dataclass(frozen=True)
class Machine:
    """A machine, as vLLM sees it.

    Attributes:
        platform: `CPU`, `CUDA` or `ROCM`; of other platforms vLLM's name for them.
        name: of the device.
        capability: compute capability of a GPU, for example (9, 0); None elsewhere.
        flash_attention: the versions of FlashAttention that vLLM can use here.
        flashinfer: whether FlashInfer is installed for a GPU.
        triton: whether vLLM can use Triton.
        fp8_cache: whether keys and values can be kept in float8.
        cores: processor cores of the host that this process may use.
        memory: bytes of the device that are free; of a CPU, of the host.
    """

    platform: str
    name: str = ""
    capability: tuple[int, int] | None = None
    flash_attention: tuple[int, ...] = ()
    flashinfer: bool = False
    triton: bool = False
    fp8_cache: bool = False
    cores: int = 1
    memory: int = 0


def this_machine() -> Machine:
    """The machine that this process runs on; nothing is allocated on a device."""
    import torch
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    platform = CPU if current_platform.is_cpu() else current_platform.device_type
    if current_platform.is_rocm():
        platform = ROCM
    elif current_platform.is_cuda():
        platform = CUDA
    found = None if platform == CPU else current_platform.get_device_capability()
    capability = (found.major, found.minor) if found is not None else None
    if platform == CPU:
        # vLLM's CPU attention reads float8 caches with these instructions only.
        fp8_cache = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_supported()
    else:
        fp8_cache = current_platform.supports_fp8()
    return Machine(
        platform=platform,
        name=current_platform.get_device_name() or platform,
        capability=capability,
        flash_attention=_flash_attention() if platform == CUDA else (),
        flashinfer=_has_flashinfer() if platform == CUDA else False,
        triton=HAS_TRITON,
        fp8_cache=bool(fp8_cache),
        cores=len(os.sched_getaffinity(0)),
        memory=free_memory(platform),
    )


def free_memory(platform: str) -> int:
    """Free bytes of the first device of a platform; of a CPU, of the host."""
    import torch

    if platform in (CUDA, ROCM):
        free: int = torch.cuda.mem_get_info()[0]
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _flash_attention() -> tuple[int, ...]:
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    return tuple(version for version in (2, 3, 4) if is_fa_version_supported(version))


def _has_flashinfer() -> bool:
    from vllm.utils.flashinfer import has_flashinfer

    return has_flashinfer()
