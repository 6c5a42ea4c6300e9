"""Start-up of DiffusionGemma: what its checkpoint must say, refused by name where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.config import (
    DiffusionGemmaModelForBlockDiffusionConfig,
    VerifyAndUpdateConfig,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.config import SettingsError, check_steps, parse_generation_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DiffusionGemmaEngineConfig(VerifyAndUpdateConfig):
    """vLLM calls this once per engine configuration, before anything is allocated."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Check the checkpoint's own statements, then do what vLLM does for this model.

        Raises:
            SettingsError: ``canvas_length`` or a field of the sampler is missing or out of range.
        """
        check_canvas_length(vllm_config)
        parse_generation_config(vllm_config.model_config.try_get_generation_config())
        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)


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
