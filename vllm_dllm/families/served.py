"""Decides at start-up how a model is served: its settings, attention and commit policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_dllm.attention.routes import LayerShape, ModelAttention
from vllm_dllm.attention.served_route import apply_route
from vllm_dllm.families.base import Family
from vllm_dllm.families.config_fields import merged
from vllm_dllm.families.scheduling import SCHEDULER
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import FOLDER, OVERRIDE, SAMPLER, Served
from vllm_dllm.settings.server import STEPS, DllmSettings
from vllm_dllm.startup.checks import check_budget, refuse_unsupported
from vllm_dllm.startup.commit_choice import choose_commits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def configure_engine(vllm_config: VllmConfig, family: Family, layers: Sequence[LayerShape]) -> None:
    """Decide how a model is served, once its canvas length is known, and configure vLLM.

    Sets the scheduler, the attention backend, the sizes of CUDA graphs, how many draft tokens a
    step has, and ``model_config.dllm``. `layers` has the different shapes of attention layers.
    Raises ValueError, which names an option, a setting or a field that cannot work.
    """
    refuse_unsupported(vllm_config)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if family.one_stage and stages > 1:
        raise SettingsError(
            f"--pipeline-parallel-size {stages}: {family.one_stage}; use --tensor-parallel-size"
        )
    scheduler, diffusion = vllm_config.scheduler_config, vllm_config.diffusion_config
    if scheduler.async_scheduling is None and current_platform.is_cpu():
        # A step in flight hides the host's work, but on the CPU the host does all the work.
        scheduler.async_scheduling = False
    settings, given = DllmSettings(), vllm_config.additional_config
    if given:
        from vllm_dllm.settings.parsing import parse_settings

        settings = parse_settings(given, family.corruption, family.algorithm)
    if diffusion.max_denoising_steps is not None:
        STEPS.check("--diffusion-config: max_denoising_steps", diffusion.max_denoising_steps)
    stated, elsewhere = generation_settings(vllm_config, family)
    length, model = diffusion.canvas_length, vllm_config.model_config
    commits = choose_commits(vllm_config, settings, family.aligned, length, family.shifted)
    served = Served(
        corruption=family.corruption,
        own_algorithm=family.algorithm,
        settings=settings,
        checkpoint=stated,
        length=length,
        max_steps=settings.max_steps or diffusion.max_denoising_steps,
        mask_token=model.hf_config.mask_token_id if family.corruption == "mask" else None,
        commits=commits,
        elsewhere=elsewhere,
        excludes=family.excludes,
        verifies=family.verifies,
        edit_tokens=family.edit_tokens(vllm_config),
        usual=dict(family.usual),  # a plain one, which can be pickled
        end_tokens=[end for end in family.end_tokens if end < model.get_vocab_size()],
    )
    check_settings(family, served, layers, model.max_model_len)
    choice = served.choose()
    check_budget(vllm_config, served.window_length)
    dtype = str(model.dtype).removeprefix("torch.")
    attention = ModelAttention(family.aligned, length, tuple(layers), settings.window, dtype)
    apply_route(vllm_config, attention)
    diffusion.canvas_length = served.window_length
    if current_platform.support_static_graph_mode() and not model.enforce_eager:
        from vllm_dllm.startup.default_limits import set_capture_sizes

        set_capture_sizes(vllm_config, served.window_length)
    scheduler.scheduler_cls = SCHEDULER
    model.dllm = served
    values = ", ".join(f"{name}={value:g}" for name, value in choice.settings.values().items())
    mask = "" if served.mask_token is None else f", mask token {served.mask_token}"
    logger.info(
        f"dllm: {choice.algorithm.name} ({values}), blocks of {length} tokens{mask}, up to "
        f"{choice.max_steps} steps a canvas, {scheduler.max_num_seqs} requests at a time, "
        f"execution {settings.execution}"
    )


def check_settings(
    family: Family, served: Served, layers: Sequence[LayerShape], context: int
) -> None:
    """Raise `SettingsError` for settings that do not work with this model, or not here."""
    name, settings, blocks = type(family).__name__, served.settings, served.settings.blocks
    if blocks > 1 and not family.several_blocks:
        raise SettingsError(
            f"dllm.blocks={blocks}: {name} cannot decode several blocks at once; remove it"
        )
    if blocks > 1 and blocks * served.length > context:
        raise SettingsError(
            f"dllm.blocks={blocks}: the context of {context} tokens has no room for so many blocks "
            f"of {served.length}; lower it"
        )
    if settings.window != "symmetric" and all(layer.window is None for layer in layers):
        raise SettingsError(
            f"dllm.window is for sliding-window layers, and {name} has none; remove it"
        )
    if settings.eos_early_stop is not None and family.corruption == "uniform":
        raise SettingsError(
            "dllm.eos_early_stop is for canvases whose decided positions stay as they are, which "
            f"{name}'s do not; remove it"
        )
    if settings.kernels == "triton" and not HAS_TRITON:
        raise SettingsError("dllm.kernels=triton: vLLM has no Triton here; remove it")


def generation_settings(
    vllm_config: VllmConfig, family: Family
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The decoding settings of the generation config, as `Served.checkpoint` and `.elsewhere`.

    ``--generation-config vllm`` affects only the sampling parameters of requests. Raises
    `SettingsError` if a field is missing or has no effect, or the file is not a JSON object.
    """
    model = vllm_config.model_config
    override = model.override_generation_config
    if override:
        from vllm_dllm.settings.unknown_names import refuse_overrides

        refuse_overrides(override, family.corruption)
    own = model.generation_config in ("auto", "vllm")
    file = Path(model.model if own else model.generation_config) / "generation_config.json"
    if file.is_file():
        try:
            whole = isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise SettingsError(f"{file} is not a JSON object")
    settings = family.checkpoint_settings(merged(model.try_get_generation_config(), override))
    elsewhere = {} if own else dict.fromkeys(settings, FOLDER)
    overridden = settings.keys() & {*override, *override.get(SAMPLER, {})}
    return settings, elsewhere | dict.fromkeys(overridden, OVERRIDE)
