"""The part of the start-up that is the same for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.families.base import Family
from vllm_dllm.families.scheduling import SCHEDULER
from vllm_dllm.families.served import served_of
from vllm_dllm.settings.resolution import Served
from vllm_dllm.startup.checks import check_kernels
from vllm_dllm.startup.commit_choice import TWO_BLOCKS, choose_commits
from vllm_dllm.startup.graph_sizes import set_capture_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def settle(vllm_config: VllmConfig, family: Family) -> Served:
    """Settle how a model is served, once its canvas length is known, and tell vLLM.

    Sets the scheduler, the sizes of CUDA graphs, how many draft tokens a step has, and
    ``model_config.dllm``.

    Raises:
        SettingsError: a setting is unknown or out of range, or cannot work here.
    """
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling is None and current_platform.is_cpu():
        # A step in flight hides the host's work, and on the CPU the host does all of it.
        scheduler.async_scheduling = False
    served = served_of(vllm_config, family)
    check_kernels(served)
    in_place = family.commits_in_place
    commits = choose_commits(vllm_config, served.settings, in_place, served.length)
    logger.info("dllm: %s", commits)
    served = replace(served, two_blocks=commits.way == TWO_BLOCKS)
    vllm_config.diffusion_config.canvas_length = served.window_length
    set_capture_sizes(vllm_config, served.window_length)
    scheduler.scheduler_cls = SCHEDULER
    vllm_config.model_config.dllm = served
    return served
