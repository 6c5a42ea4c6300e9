"""Know which models are ours, register their classes, and fit vLLM's default limits to them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_dllm.families.registry import (
    CONFIGS,
    architectures,
    family,
    family_of,
    model_class,
    served_architectures,
)
from vllm_dllm.vllm_seams.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class RefusedError(RuntimeError):
    """A configuration that cannot be served; the message names the option and the remedy.

    It is not a ``ValueError``, because vLLM's configuration consists of pydantic dataclasses, which
    turn a ``ValueError`` into several lines that quote all of their input.
    """


EXECUTOR = "vllm.v1.executor.multiproc_executor"


def is_ours(model_config: ModelConfig | None) -> bool:
    """Whether this package serves the model."""
    return model_config is not None and model_config.architecture in served_architectures()


def register_models() -> None:
    """Register our classes with vLLM and transformers.

    Classes are registered by their paths, because most processes need one of them or none.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.transformers_utils import configs
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_dllm.attention.backend.MaskAttentionBackend"
        )
    for model_type, (folder, name) in CONFIGS.items():
        # vLLM registers the class with transformers when a checkpoint has this type.
        _CONFIG_REGISTRY[model_type] = name  # type: ignore[assignment]
        configs._CLASS_TO_MODULE[name] = f"vllm_dllm.families.{folder}.hf_config"
    for architecture in served_architectures():
        ModelRegistry.register_model(architecture, model_class(architecture))
    hooks = {
        "verify_and_update_model_config": staticmethod(_complete),
        "verify_and_update_config": staticmethod(_configure),
    }
    for architecture in architectures():
        MODELS_CONFIG_MAP[architecture] = type("EngineConfig", (VerifyAndUpdateConfig,), hooks)


def _complete(model_config: ModelConfig) -> None:
    """Complete the configuration of a checkpoint of ours; raises `RefusedError`."""
    with _naming_its_source():
        family(model_config.architecture).complete(model_config)


def _configure(vllm_config: VllmConfig) -> None:
    """Complete vLLM's configuration for one of our models; raises `RefusedError`."""
    with _naming_its_source():
        family_of(vllm_config).configure(vllm_config)


@contextlib.contextmanager
def _naming_its_source() -> Iterator[None]:
    """Turn a refusal into a `RefusedError`."""
    try:
        yield
    except ValueError as error:
        note = ""
        if "--config" in sys.argv[1:-1]:  # its file may hold the mistake
            file = sys.argv[sys.argv.index("--config") + 1]
            note = f" (options were also read from --config {file})"
        raise RefusedError(f"{error}{note}") from error


def adjust_default_limits() -> None:
    """Adjust vLLM's defaults for ``max_num_seqs`` and the token budget for our models.

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
            self_conditioned = family(model_config.architecture).self_conditioned
            set_defaults(self, model_config, is_given, self_conditioned)

    return set_default_limits


def shut_executors_down() -> None:
    """End the workers of an engine that fails to start together with it, see `worker_shutdown`.

    A process with such workers has imported vLLM's executor when it loads plugins, or is forked
    from a front end that has imported it.
    """
    if EXECUTOR in sys.modules:
        from vllm_dllm.vllm_seams import worker_shutdown

        worker_shutdown.apply()
