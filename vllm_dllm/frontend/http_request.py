"""An HTTP request, from the time when vLLM's handler begins with it until it is answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_dllm.frontend import current
from vllm_dllm.frontend.admission import refuse_beam_search
from vllm_dllm.ranges import cut
from vllm_dllm.settings.resolution import REQUEST_PREFIX, TRACING_OPTIONS

# Fields that no endpoint knows and under which clients may have put options.
_OTHER_PLACES = {
    "extra_body": "is an argument of OpenAI's Python client, which sends its content instead of "
    "it; put its content into the request itself.",
    "extra_args": 'is for SamplingParams in Python; over HTTP write {"vllm_xargs": {...}}.',
    "dllm": "holds settings of a server (--additional-config); a request's options are "
    '{"vllm_xargs": {"diffusion_...": ...}}.',
}
# The last parts of the paths of endpoints whose answers have choices, and so a place for traces.
_WITH_CHOICES = ("/completions", "/inference/v1/generate")


@dataclass
class HttpRequest:
    """What is known about an HTTP request while it is being answered.

    Attributes:
        path: path of its endpoint; empty if vLLM's handlers are called without a server.
        client: who sends it, by API key or address.
        request: the request as vLLM's handler received it; None for an endpoint that generates
            nothing.
        asks_for_calls: see `tool_calls.asks_for_calls`.
        traced: whether its answer gets traces.
        queues: vLLM's output queue of each of its prompts; None until the engine has taken it.
        error: why the request, or one of its prompts, was not given to the engine.
    """

    path: str = ""
    client: str = ""
    request: Any = None
    asks_for_calls: bool | None = None
    traced: bool = False
    queues: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def admitted(self) -> bool:
        """Whether the engine has taken one of its prompts."""
        return any(queue is not None for queue in self.queues)

    def fail(self, error: Exception) -> None:
        """Note why a prompt was not admitted, as the error that vLLM makes from it."""
        known = isinstance(error, (VLLMClientError, GracefulHTTPError, EngineDeadError))
        self.error = error if known else EngineGenerateError()

    def sets_its_maximum(self) -> bool:
        """Whether the request sets a maximum number of output tokens.

        The server's defaults do not count, except the one for completions, which vLLM writes into
        every request.
        """
        request = self.request
        if hasattr(request, "is_sampling_param_provided"):
            return bool(request.is_sampling_param_provided("max_tokens"))
        names = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        return any(getattr(request, name) is not None for name in names & request.model_fields_set)

    def constraint(self, params: SamplingParams) -> StructuredOutputsParams | None:
        """The constraint of the request, for which vLLM has made these parameters."""
        if not getattr(self.request, "tools", None):
            return params.structured_outputs
        from vllm_dllm.frontend.tool_calls import constrained_calls

        return constrained_calls(self.request, params.structured_outputs)


@dataclass(frozen=True)
class Endpoints:
    """The endpoints of a server that generate text.

    Attributes:
        request_classes: vLLM's classes of the requests to them.
        options: the names of our options, without the prefix.
    """

    request_classes: tuple[type[Any], ...]
    options: Collection[str]

    def take(self, request: Any) -> None:
        """Note an HTTP request as vLLM's handler begins with it, before vLLM changes it.

        Args:
            request: a request of vLLM's HTTP server.

        Raises:
            VLLMValidationError: it asks for something that its endpoint ignores, for a beam search,
                or for two constraints.
        """
        if not isinstance(request, self.request_classes):
            return
        self.refuse_misplaced(getattr(request, "model_extra", None) or {})
        if getattr(request, "use_beam_search", False):
            refuse_beam_search()
        http = current.get()
        if http is None or not http.path:  # vLLM's handlers are called without its server
            http = HttpRequest()
            current.set(http)
        if http.path.endswith("/v1/messages"):
            continue_last_message(request)
        http.traced = asks_for_traces(request, http.path)
        if getattr(request, "tools", None):
            from vllm_dllm.frontend.tool_calls import asks_for_calls

            http.asks_for_calls = asks_for_calls(request)
        http.request = request

    def refuse_misplaced(self, unknown: Mapping[str, Any]) -> None:
        """Refuse fields of a request that were meant to have an effect but would be ignored.

        vLLM ignores every field that its request class for this endpoint does not know. Among
        those, this refuses our own options outside ``vllm_xargs`` or without their prefix, fields
        that hold options elsewhere, vLLM's old options for structured output, and any field that
        another endpoint honours, unless its value is a default. Any other field that no endpoint
        knows is ignored, as for any model.

        Args:
            unknown: the fields that this endpoint's class does not know, with their values.

        Raises:
            VLLMValidationError: names the field of the HTTP request and where it belongs.
        """
        for name, value in unknown.items():
            if name.startswith("guided_"):
                problem = "is a former name in vLLM; use structured_outputs."
            elif name in _OTHER_PLACES and value is not None:
                problem = _OTHER_PLACES[name]
            elif name.startswith(REQUEST_PREFIX):
                problem = f'belongs in vllm_xargs: {{"vllm_xargs": {{"{cut(name)}": ...}}}}.'
            elif name in self.options:
                option = REQUEST_PREFIX + name
                problem = f'is not read here; write {{"vllm_xargs": {{"{option}": ...}}}}.'
            elif value is not None and value not in self._defaults.get(name, [value]):
                problem = "is not supported on this endpoint, only on others."
            else:
                continue
            raise VLLMValidationError(f"{cut(name)} {problem}", parameter=cut(name))

    @cached_property
    def _defaults(self) -> dict[str, list[Any]]:
        """The fields of all requests and of sampling parameters, each with all of its defaults."""
        defaults: dict[str, list[Any]] = {}
        for request_class in self.request_classes:
            for name, known in request_class.model_fields.items():
                defaults.setdefault(name, []).append(known.get_default(call_default_factory=True))
        sampling_params = SamplingParams()
        for name in SamplingParams.__struct_fields__:
            if not name.startswith("_"):
                defaults.setdefault(name, []).append(getattr(sampling_params, name))
        return defaults


def continue_last_message(request: Any) -> None:
    """Make an answer at ``/v1/messages`` continue a trailing message of the assistant.

    Anthropic's own API does the same. vLLM would begin a new message after it.

    Args:
        request: a request of vLLM's HTTP server, which may be changed.

    Raises:
        VLLMValidationError: the assistant's last message is not text.
    """
    last = request.messages[-1]
    if last["role"] != "assistant":
        return
    if last.keys() != {"role", "content"} or not isinstance(last["content"], str):
        raise VLLMValidationError(
            "messages: a last message of the assistant is continued if it is a text, and this one "
            "is not; end with a message of the user.",
            parameter="messages",
        )
    request.continue_final_message, request.add_generation_prompt = True, False


def asks_for_traces(request: Any, path: str) -> bool:
    """Whether an HTTP request asks for anything that `frontend.traces` provides.

    Args:
        request: a request of vLLM's HTTP server.
        path: the path of its endpoint.

    Raises:
        VLLMValidationError: the endpoint's answer has no place for it; the message names the
            option.
    """
    sampling = getattr(request, "sampling_params", None)
    extra = getattr(request, "vllm_xargs", None) or getattr(sampling, "extra_args", None) or {}
    asked = [REQUEST_PREFIX + name for name in TRACING_OPTIONS if extra.get(REQUEST_PREFIX + name)]
    if not asked:
        return False
    if not path.endswith(_WITH_CHOICES):
        raise VLLMValidationError(
            f"{asked[0]} has no effect at this endpoint, whose answers have no place for it; use "
            "/v1/chat/completions or /v1/completions.",
            parameter=asked[0],
        )
    if request.stream:
        raise VLLMValidationError(
            f"{asked[0]} is not supported with stream, because it comes with a whole answer; send "
            '"stream": false, or watch the server (--middleware vllm_dllm.viewer.live.LivePage).',
            parameter=asked[0],
        )
    return True
