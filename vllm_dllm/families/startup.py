"""The part of the start-up that is the same for every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dllm.cpu.norms import prefer_compiled_norms
from vllm_dllm.families.base import Family
from vllm_dllm.families.scheduling import SCHEDULER
from vllm_dllm.families.served import served_of
from vllm_dllm.settings.resolution import Served
from vllm_dllm.startup.checks import check_kernels
from vllm_dllm.startup.graph_sizes import set_capture_sizes
from vllm_dllm.worker.fused_commit import fuses

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def settle(vllm_config: VllmConfig, family: Family) -> Served:
    """Settle how a model is served, once its canvas length is known, and tell vLLM.

    Sets the scheduler, the norms, the sizes of CUDA graphs and ``model_config.dllm``.

    Raises:
        SettingsError: a setting is unknown or out of range, or cannot work here.
    """
    served = served_of(vllm_config, family)
    check_kernels(served)
    # The model state asks again; this refuses an impossible setting before weights are read.
    fuses(vllm_config, served.settings, family.commits_in_place)
    prefer_compiled_norms(vllm_config)
    set_capture_sizes(vllm_config, served.length)
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    vllm_config.model_config.dllm = served
    return served
