"""Know which models are ours, register their classes, and fit vLLM's default limits to them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import util
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
    for model_type, (module, name) in CONFIGS.items():
        # vLLM registers the class with transformers when a checkpoint has this type.
        _CONFIG_REGISTRY[model_type] = name  # type: ignore[assignment]
        configs._CLASS_TO_MODULE[name] = f"vllm_dllm.families.{module}"
    for architecture in served_architectures():
        ModelRegistry.register_model(architecture, model_class(architecture))
    hooks = {
        "verify_and_update_model_config": staticmethod(_complete),
        "verify_and_update_config": staticmethod(_configure),
    }
    for architecture in architectures():
        MODELS_CONFIG_MAP[architecture] = type("EngineConfig", (VerifyAndUpdateConfig,), hooks)


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


@_naming_its_source()
def _complete(model_config: ModelConfig) -> None:
    family(model_config.architecture).complete(model_config)


@_naming_its_source()
def _configure(vllm_config: VllmConfig) -> None:
    family_of(vllm_config).configure(vllm_config)


def adjust_default_limits() -> None:
    """Adjust vLLM's defaults for ``max_num_seqs`` and the token budget for our models.

    A default can be distinguished from a value that the user gave only where vLLM fills it in.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", _fit_canvases)


def _fit_canvases(
    original: Callable[..., None], self: Any, usage_context: Any, model_config: Any, *others: Any
) -> None:
    is_given = (self.max_num_seqs is not None, self.max_num_batched_tokens is not None)
    original(self, usage_context, model_config, *others)
    if is_ours(model_config):
        from vllm_dllm.startup.default_limits import set_defaults

        self_conditioned = family(model_config.architecture).self_conditioned
        set_defaults(self, model_config, is_given, self_conditioned)


def shut_executors_down() -> None:
    """End the workers of an engine that fails to start together with it.

    Such an engine leaves its workers to Python's `multiprocessing`, which sends them SIGTERM and
    then waits without a limit, although a worker may miss the signal. vLLM's own shutdown kills
    such a worker after 9 s, but is not called (``docs/upstream/process_supervision.md``).

    A process with such workers has imported vLLM's executor when it loads plugins, or is forked
    from a front end that has imported it.
    """
    if executor := sys.modules.get("vllm.v1.executor.multiproc_executor"):
        wrap(executor.MultiprocExecutor, "_init_executor", _shut_down_at_exit)


def _shut_down_at_exit(original: Callable[..., None], self: Any) -> None:
    """Shut an executor down before its process waits for its child processes."""
    original(self)
    if is_ours(self.vllm_config.model_config):
        util.Finalize(None, _shut_down, (weakref.ref(self),), exitpriority=0)


def _shut_down(executor: weakref.ref[Any]) -> None:
    running = executor()
    if running is not None:
        running.shutdown()  # has no effect if it was called before
