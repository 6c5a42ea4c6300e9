"""Adjust vLLM's defaults for ``max_num_seqs`` and the token budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.families.registry import families
from vllm_dllm.vllm_seams.registration import is_ours
from vllm_dllm.vllm_seams.wrapping import wrap


def apply() -> None:
    """Adjust these defaults for our models.

    A default can be distinguished from a value that the user gave only where vLLM fills it in.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", _fit_canvases)


def _fit_canvases(original: Callable[..., None]) -> Callable[..., None]:
    from vllm_dllm.startup.default_limits import set_defaults

    def set_default_limits(
        self: Any, usage_context: Any, model_config: Any, *positional: Any
    ) -> None:
        is_given = (self.max_num_seqs is not None, self.max_num_batched_tokens is not None)
        original(self, usage_context, model_config, *positional)
        if is_ours(model_config):
            family = families()[model_config.architecture]
            set_defaults(self, model_config, is_given, family.self_conditioned)

    return set_default_limits
