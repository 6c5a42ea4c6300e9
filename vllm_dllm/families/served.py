"""What is settled for a served model at start-up: settings, canvases and the commit policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.decoding import get_algorithm
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.engine.step_plan import CommitPolicy
from vllm_dllm.families.base import Family
from vllm_dllm.settings.parsing import parse_settings
from vllm_dllm.settings.ranges import SettingsError
from vllm_dllm.settings.resolution import (
    CHECKPOINT,
    DEFAULT,
    SERVER,
    Served,
    check_algorithm,
    foreign_settings,
    parameter_names,
)
from vllm_dllm.settings.server import STEPS, DllmSettings
from vllm_dllm.startup.commit_choice import GRANTED, choose_commits

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def settings_of(vllm_config: VllmConfig, family: Family) -> DllmSettings:
    """The server's settings; raises `SettingsError`."""
    corruption, chosen = family.corruption, family.algorithm

    def parameters_with(algorithm: object) -> set[str]:
        nonlocal chosen
        if isinstance(algorithm, str) and algorithm:
            # Before its settings are looked at, which would be refused for a lesser reason. An
            # algorithm that is named by its path is registered by this.
            check_algorithm(algorithm, corruption, SERVER)
            chosen = algorithm
        return parameter_names(corruption)

    def foreign() -> dict[str, str]:
        return foreign_settings(get_algorithm(chosen, corruption)[0], SERVER)

    return parse_settings(vllm_config.additional_config, parameters_with, foreign)


def served_of(vllm_config: VllmConfig, family: Family) -> Served:
    """The decoding settings of a model that starts. The canvas length must have been settled.

    Raises:
        SettingsError: a setting or a field of the checkpoint is unknown or out of range.
    """
    settings = settings_of(vllm_config, family)
    diffusion = vllm_config.diffusion_config
    if diffusion.max_denoising_steps is not None:
        STEPS.check("--diffusion-config: max_denoising_steps", diffusion.max_denoising_steps)
    served = Served(
        corruption=family.corruption,
        own_algorithm=family.algorithm,
        settings=settings,
        checkpoint=family.checkpoint_settings(generation_config(vllm_config)),
        length=diffusion.canvas_length,
        max_steps=settings.max_steps or diffusion.max_denoising_steps,
        mask_token=family.mask_token(vllm_config),
    )
    served.choose()
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


def generation_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """The content of the checkpoint's ``generation_config.json``; empty if there is no such file.

    Raises:
        SettingsError: the file is no JSON object; vLLM would ignore it silently.
    """
    model = vllm_config.model_config
    file = Path(model.model) / "generation_config.json"
    if file.is_file():
        try:
            whole = isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise SettingsError(f"generation_config.json of {model.model} is no JSON object")
    return model.try_get_generation_config()


def length_source(vllm_config: VllmConfig, diffusion: Mapping[str, Any] | None) -> str:
    """Where the canvas length comes from; ``diffusion`` is the value of ``--diffusion-config``."""
    if (diffusion or {}).get("canvas_length"):
        return SERVER
    model = vllm_config.model_config
    stated = get_hf_file_to_dict("config.json", model.model, model.revision) or {}
    names = ("block_length", "canvas_length", "block_size")
    return CHECKPOINT if any(stated.get(name) for name in names) else DEFAULT
