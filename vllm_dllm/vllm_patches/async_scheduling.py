"""An explicit ``--async-scheduling`` on the CPU, where vLLM switches it off without being asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Honour the option for our models; nothing is wrapped on another platform."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    wrap(VllmConfig, "try_verify_and_update_config", _remember_the_option)
    wrap(type(current_platform), "check_and_update_config", _restore_the_option)


def _remember_the_option(original: Callable[..., None]) -> Callable[..., None]:
    def try_verify_and_update_config(self: Any) -> None:
        requested = self.scheduler_config.async_scheduling is True
        original(self)
        if is_ours(self.model_config):
            self.model_config.dllm_async_scheduling = requested

    return try_verify_and_update_config


def _restore_the_option(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(platform: type, vllm_config: Any) -> None:
        original(platform, vllm_config)
        model_config = vllm_config.model_config
        if is_ours(model_config) and model_config.dllm_async_scheduling:
            vllm_config.scheduler_config.async_scheduling = True

    return check_and_update_config
