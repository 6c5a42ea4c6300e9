"""Start-up of DiffusionGemma: what its checkpoint must say, and what the engine is set to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.config import (
    DiffusionGemmaModelForBlockDiffusionConfig,
    VerifyAndUpdateConfig,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.config import SettingsError, check_steps, parse_generation_config, parse_settings
from vllm_dllm.engine.admission import Served
from vllm_dllm.engine.families import step_cap
from vllm_dllm.engine.setup import (
    SCHEDULER,
    check_budget,
    checked_algorithm,
    refuse_unsupported,
)
from vllm_dllm.engine.windows import check_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


class DiffusionGemmaCheckpointConfig(VerifyAndUpdateConfig):
    """Checks of the checkpoint alone, then vLLM's own start-up: for vLLM's own class."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse an incomplete checkpoint by the missing field's name.

        Raises:
            SettingsError: ``canvas_length`` or a field of the sampler is missing or out of range.
        """
        check_canvas_length(vllm_config)
        parse_generation_config(vllm_config.model_config.try_get_generation_config())
        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)


class DiffusionGemmaEngineConfig(VerifyAndUpdateConfig):
    """vLLM calls this once per engine configuration, before anything is allocated."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Fill in what our class needs; refuse what cannot work.

        Raises:
            ValueError: with the setting's name and the remedy.
        """
        refuse_unsupported(vllm_config)
        settings = parse_settings(vllm_config.additional_config)
        check_window(settings.window)
        if settings.eos_early_stop is not None:
            raise SettingsError(
                "dllm.eos_early_stop is for canvases whose decided positions stay as they are, "
                "which DiffusionGemma's do not; remove it"
            )
        seats = vllm_config.scheduler_config.max_num_seqs
        DiffusionGemmaCheckpointConfig.verify_and_update_config(vllm_config)
        # vLLM's class holds whole rows of logits and therefore serves 8 requests at most.
        vllm_config.scheduler_config.max_num_seqs = seats
        algorithm = checked_algorithm(vllm_config)
        length = vllm_config.diffusion_config.canvas_length
        check_budget(vllm_config, length)
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        vllm_config.model_config.dllm = Served(algorithm.name, algorithm.parameters, samples=True)
        logger.info(
            "dllm: %s, canvas length %d, up to %d steps a canvas, %d requests at a time",
            algorithm.name,
            length,
            step_cap(vllm_config),
            seats,
        )


def check_canvas_length(vllm_config: VllmConfig) -> None:
    """The canvas length must be stated: transformers would fill in 256 without a word."""
    model, diffusion = vllm_config.model_config, vllm_config.diffusion_config
    if diffusion is not None and diffusion.canvas_length:
        return
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    stated = get_hf_file_to_dict("config.json", model.model, model.revision) or {}
    length = {**stated, **overrides}.get("canvas_length")
    if length is None:
        raise SettingsError(
            f"config.json of {model.model} has no 'canvas_length'; pass "
            "--diffusion-config '{\"canvas_length\": L}' with the length it was trained with"
        )
    check_steps("config.json: canvas_length", length)
