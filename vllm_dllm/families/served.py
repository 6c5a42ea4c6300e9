"""What is settled for a served model at start-up: settings, canvases and the commit policy."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.decoding import MODELS, algorithms, get_algorithm, other_kind
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.engine.step_plan import CommitPolicy
from vllm_dllm.families.base import Family
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.checkpoint import (
    LENGTHS,
    SAMPLER,
    SAMPLER_FIELDS,
    check_sampler_override,
    overridden,
)
from vllm_dllm.settings.misplaced import as_option
from vllm_dllm.settings.parsing import parse_settings, server_names
from vllm_dllm.settings.resolution import (
    CHECKPOINT,
    DEFAULT,
    FOLDER,
    HF_OVERRIDES,
    OVERRIDE,
    SERVER,
    Served,
    check_algorithm,
    foreign_settings,
    parameter_names,
)
from vllm_dllm.settings.server import STEPS, DllmSettings
from vllm_dllm.startup.commit_choice import GRANTED, choose_commits
from vllm_dllm.startup.config_fields import (
    hf_overrides,
    merged,
    stated_fields,
    warn_of_unread_names,
)

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


def generation_settings(
    vllm_config: VllmConfig, family: Family
) -> tuple[Mapping[str, float], dict[str, str]]:
    """The decoding settings of the generation config, as `Served.checkpoint` and `.elsewhere`.

    Like vLLM it is the checkpoint's, unless ``--generation-config`` names a folder; and
    ``--override-generation-config`` overrides its fields. ``--generation-config vllm`` is about
    the sampling parameters of requests alone.

    Raises:
        SettingsError: a field is missing or out of range, or has no effect as an override.
    """
    model = vllm_config.model_config
    override = model.override_generation_config
    _refuse_overrides_without_effect(override, family)
    settings = family.checkpoint_settings(merged(generation_config(vllm_config), override))
    own = model.generation_config in ("auto", "vllm")
    elsewhere = {} if own else dict.fromkeys(settings, FOLDER)
    return settings, elsewhere | dict.fromkeys(overridden(settings, override), OVERRIDE)


def _refuse_overrides_without_effect(override: Mapping[str, Any], family: Family) -> None:
    """Refuse decoding settings that a generation config of this model cannot state."""
    own, other = family.corruption, other_kind(family.corruption)
    parameters, foreign = parameter_names(own), parameter_names(other)
    stated = SAMPLER_FIELDS if own == "uniform" else parameters
    for name, value in override.items():
        if name in LENGTHS:
            length = json.dumps({"canvas_length": value})
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use --diffusion-config "
                f"'{length}'"
            )
        if name in server_names(parameters) and name not in stated:
            raise SettingsError(
                f"{OVERRIDE}: {name} is not read from a generation config; use "
                f"{as_option({name: value})}"
            )
        if (name in foreign and name not in parameters) or (name == SAMPLER and own != "uniform"):
            raise SettingsError(
                f"{OVERRIDE}: {name} is not a setting of this model, but of {MODELS[other]}; "
                "remove it (--additional-config has this model's settings)"
            )
    check_sampler_override(override)


def warn_of_unread(vllm_config: VllmConfig, unread: Collection[str], family: Family) -> None:
    """Warn of fields of ``config.json`` that nothing reads; see `warn_of_unread_names`."""
    kind = family.corruption
    warn_of_unread_names(
        vllm_config.model_config,
        unread,
        server_names(parameter_names(kind)),
        [algorithm.name for algorithm in algorithms(kind)],
    )


def generation_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """The content of ``generation_config.json``; empty if there is no such file.

    Raises:
        SettingsError: the file is not a JSON object; vLLM would ignore it silently.
    """
    model = vllm_config.model_config
    own = model.generation_config in ("auto", "vllm")
    file = Path(model.model if own else model.generation_config) / "generation_config.json"
    if file.is_file():
        try:
            whole = isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise SettingsError(f"{file} is not a JSON object")
    return model.try_get_generation_config()


def length_source(vllm_config: VllmConfig, diffusion: Mapping[str, Any] | None) -> str:
    """Where the canvas length comes from; ``diffusion`` is the value of ``--diffusion-config``."""
    if (diffusion or {}).get("canvas_length"):
        return SERVER
    model = vllm_config.model_config
    stated = stated_fields(model)
    name = next((name for name in LENGTHS if stated.get(name)), None)
    if name is None:
        return DEFAULT
    return HF_OVERRIDES if name in hf_overrides(model) else CHECKPOINT
