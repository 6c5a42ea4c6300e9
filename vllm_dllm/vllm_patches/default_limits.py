"""vLLM's defaults of ``max_num_seqs``, of the token budget and of the shutdown timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.families.registry import families
from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Adjust these defaults for our models.

    Only where vLLM fills its defaults in can one of them be told from a value that the user gave.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", _fit_canvases)
    wrap(EngineArgs, "add_cli_args", _mark_default_shutdown_timeout)


def _fit_canvases(original: Callable[..., None]) -> Callable[..., None]:
    from vllm_dllm.startup.default_limits import DRAIN_SECONDS, NotGiven, set_defaults

    def set_default_limits(
        self: Any, usage_context: Any, model_config: Any, *positional: Any
    ) -> None:
        is_given = (self.max_num_seqs is not None, self.max_num_batched_tokens is not None)
        original(self, usage_context, model_config, *positional)
        ours = is_ours(model_config)
        if isinstance(self.shutdown_timeout, NotGiven):
            self.shutdown_timeout = DRAIN_SECONDS if ours else int(self.shutdown_timeout)
        if ours:
            from vllm_dllm.vllm_patches import shutdown

            family = families()[model_config.architecture]
            set_defaults(self, model_config, is_given, family.self_conditioned)
            # The parent of several API servers makes no front end: here it learns of its model.
            shutdown.apply_to_parent_of_api_servers()

    return set_default_limits


def _mark_default_shutdown_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.startup.default_limits import NotGiven

    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        parser.set_defaults(shutdown_timeout=NotGiven(parser.get_default("shutdown_timeout")))
        return parser

    return add_cli_args
