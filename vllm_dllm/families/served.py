"""Decides at start-up how a model is served: its settings, canvases and commit policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.decoding import algorithms, get_algorithm
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.engine.step import CommitPolicy
from vllm_dllm.families.base import Family
from vllm_dllm.families.generation_config import generation_settings
from vllm_dllm.families.scheduling import SCHEDULER
from vllm_dllm.settings.generation_config import LENGTHS
from vllm_dllm.settings.parsing import parse_settings, server_names
from vllm_dllm.settings.resolution import (
    CHECKPOINT,
    DEFAULT,
    HF_OVERRIDES,
    SERVER,
    Served,
    check_algorithm,
    foreign_settings,
    parameter_names,
)
from vllm_dllm.settings.server import STEPS, DllmSettings
from vllm_dllm.startup.checks import check_kernels
from vllm_dllm.startup.commit_choice import GRANTED, TWO_BLOCKS, choose_commits
from vllm_dllm.startup.config_fields import (
    hf_overrides,
    stated_fields,
    warn_of_unread_names,
)
from vllm_dllm.startup.graph_sizes import set_capture_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def settings_of(vllm_config: VllmConfig, family: Family) -> DllmSettings:
    """The server's settings; raises `SettingsError`."""
    corruption, chosen = family.corruption, family.algorithm

    def parameters_with(algorithm: object) -> set[str]:
        nonlocal chosen
        if isinstance(algorithm, str) and algorithm:
            # Check the algorithm before its settings, which would be refused for a less useful
            # reason. This also registers an algorithm that is named by its import path.
            check_algorithm(algorithm, corruption, SERVER)
            chosen = algorithm
        return parameter_names(corruption)

    def foreign() -> dict[str, str]:
        return foreign_settings(get_algorithm(chosen, corruption)[0], SERVER)

    return parse_settings(vllm_config.additional_config, parameters_with, foreign)


def served_of(vllm_config: VllmConfig, family: Family) -> Served:
    """The decoding settings of a model that starts. The canvas length must already be known.

    Raises:
        SettingsError: a setting or a field of the checkpoint is unknown or out of range.
    """
    settings = settings_of(vllm_config, family)
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
    in_place = family.commits_in_place
    commits = choose_commits(vllm_config, served.settings, in_place, served.length)
    logger.info("dllm: %s", commits)
    served = replace(served, two_blocks=commits.way == TWO_BLOCKS)
    vllm_config.diffusion_config.canvas_length = served.window_length
    set_capture_sizes(vllm_config, served.window_length)
    scheduler.scheduler_cls = SCHEDULER
    vllm_config.model_config.dllm = served
    return served


def canvas_kind(vllm_config: VllmConfig, family: Family, served: Served) -> CanvasKind:
    """The properties of the model's canvases."""
    vocabulary = vllm_config.model_config.get_vocab_size()
    return CanvasKind(served.length, vocabulary, served.mask_token, family.aligned)


def commit_policy(vllm_config: VllmConfig, family: Family, served: Served) -> CommitPolicy:
    """The rules by which the model's canvases leave."""
    settings, in_place = served.settings, family.commits_in_place
    granted = not served.two_blocks and (
        choose_commits(vllm_config, settings, in_place, served.length).way == GRANTED
    )
    return CommitPolicy(
        sync=settings.execution == "sync",
        early=settings.eos_early_stop is not False,
        skip_last_commit=settings.skip_last_commit,
        in_place=in_place,
        fused=granted or served.two_blocks,
        two_blocks=served.two_blocks,
    )


def warn_of_unread(vllm_config: VllmConfig, unread: Collection[str], family: Family) -> None:
    """Warn about fields of ``config.json`` that are ignored; see `warn_of_unread_names`."""
    kind = family.corruption
    warn_of_unread_names(
        vllm_config.model_config,
        unread,
        server_names(parameter_names(kind)),
        [algorithm.name for algorithm in algorithms(kind)],
    )


def length_source(vllm_config: VllmConfig, diffusion: Mapping[str, Any] | None) -> str:
    """The source of the canvas length; ``diffusion`` is the value of ``--diffusion-config``."""
    if (diffusion or {}).get("canvas_length"):
        return SERVER
    model = vllm_config.model_config
    stated = stated_fields(model)
    name = next((name for name in LENGTHS if stated.get(name)), None)
    if name is None:
        return DEFAULT
    return HF_OVERRIDES if name in hf_overrides(model) else CHECKPOINT
