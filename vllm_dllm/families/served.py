"""Decides at start-up how a model is served: its settings, canvases and commit policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.families.base import Family
from vllm_dllm.families.generation_config import generation_settings
from vllm_dllm.families.scheduling import SCHEDULER
from vllm_dllm.settings.resolution import Served, server_settings
from vllm_dllm.settings.server import STEPS
from vllm_dllm.startup.checks import check_kernels
from vllm_dllm.startup.commit_choice import choose_commits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def served_of(vllm_config: VllmConfig, family: Family) -> Served:
    """The decoding settings of a model that starts. The canvas length must already be known.

    Raises:
        SettingsError: a setting or a field of the checkpoint is unknown or out of range.
    """
    settings = server_settings(vllm_config.additional_config, family.corruption, family.algorithm)
    diffusion = vllm_config.diffusion_config
    if diffusion.max_denoising_steps is not None:
        STEPS.check("--diffusion-config: max_denoising_steps", diffusion.max_denoising_steps)
    stated, elsewhere = generation_settings(vllm_config, family)
    served = Served(
        corruption=family.corruption,
        own_algorithm=family.algorithm,
        settings=settings,
        checkpoint=stated,
        length=diffusion.canvas_length,
        max_steps=settings.max_steps or diffusion.max_denoising_steps,
        mask_token=family.mask_token(vllm_config),
        elsewhere=elsewhere,
    )
    served.choose()
    return served


def configure_engine(vllm_config: VllmConfig, family: Family) -> Served:
    """Decide how a model is served, once its canvas length is known, and configure vLLM.

    Sets the scheduler, the sizes of CUDA graphs, how many draft tokens a step has, and
    ``model_config.dllm``.

    Raises:
        SettingsError: a setting is unknown or out of range, or cannot work here.
    """
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling is None and current_platform.is_cpu():
        # A step in flight hides the host's work, but on the CPU the host does all the work.
        scheduler.async_scheduling = False
    served = served_of(vllm_config, family)
    check_kernels(served)
    commits = choose_commits(vllm_config, served.settings, family.commits_in_place, served.length)
    served = replace(served, commits=commits)
    vllm_config.diffusion_config.canvas_length = served.window_length
    if current_platform.support_static_graph_mode() and not vllm_config.model_config.enforce_eager:
        from vllm_dllm.startup.graph_sizes import set_capture_sizes

        set_capture_sizes(vllm_config, served.window_length)
    scheduler.scheduler_cls = SCHEDULER
    vllm_config.model_config.dllm = served
    return served
