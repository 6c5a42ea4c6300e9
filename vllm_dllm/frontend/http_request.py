"""An HTTP request, from the time when vLLM's handler begins with it until it is answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_dllm.frontend import current, refuse_beam_search
from vllm_dllm.frontend.refusal import STRICT, refused
from vllm_dllm.ranges import cut
from vllm_dllm.settings.resolution import REQUEST_PREFIX, TRACING_OPTIONS
from vllm_dllm.settings.server import SETTINGS_KEY

# Fields that no endpoint reads and under which clients may have put options.
_OTHER_PLACES = {
    "extra_body": "is an argument of OpenAI's Python client, which sends its content instead of "
    "it; put its content into the request itself.",
    "extra_args": 'is for SamplingParams in Python; over HTTP write {"vllm_xargs": {...}}.',
    "dllm": "holds settings of a server (--additional-config); a request's options are "
    '{"vllm_xargs": {"diffusion_...": ...}}.',
}
# What clients call the parameters that vLLM makes of their fields, where the names differ.
_NAMES = {
    "/v1/messages": {"thinking_token_budget": "thinking", "format": "output_config.format"},
    "/v1/responses": {"logprobs": "include", "format": "text.format"},
}
# The last parts of the paths of endpoints whose answers have choices, and so a place for traces.
_WITH_CHOICES = ("/completions", "/inference/v1/generate")


@dataclass
class HttpRequest:
    """The state of an HTTP request while it is being answered."""

    path: str = ""  # of its endpoint; empty if vLLM's handlers are called without a server
    client: str = ""  # who sends it, by API key or address
    request: Any = None  # as vLLM's handler received it; None if the endpoint generates nothing
    asks_for_calls: bool | None = None  # see `tool_calls.asks_for_calls`
    constrained_by: str = ""  # the field that asks for its constraint; "" if none of its own does
    traced: bool = False  # whether its answer gets traces
    # vLLM's output queue of each prompt; None until the engine has taken it.
    queues: list[Any] = field(default_factory=list)
    error: Exception | None = None  # why one of its prompts was not given to the engine

    @property
    def admitted(self) -> bool:
        """Whether the engine has taken one of its prompts."""
        return any(queue is not None for queue in self.queues)

    @property
    def is_chat(self) -> bool:
        """Whether it was made of messages."""
        return known(self.request, "messages") is not None

    def fail(self, error: Exception) -> None:
        """Note why a prompt was not admitted, as the error that vLLM makes from it."""
        known = isinstance(error, (VLLMClientError, GracefulHTTPError, EngineDeadError))
        self.error = error if known else EngineGenerateError()

    def sets_its_maximum(self) -> bool:
        """Whether the request, not the server, sets a maximum number of output tokens.

        The default for completions counts, because vLLM writes it into every request.
        """
        request = self.request
        if hasattr(request, "is_sampling_param_provided"):
            return bool(request.is_sampling_param_provided("max_tokens"))
        names = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        return any(known(request, name) is not None for name in names & request.model_fields_set)

    def called(self, name: str) -> str:
        """The field of the request from which vLLM made a parameter."""
        if name == "structured_outputs":
            return self.constrained_by or name
        if name == "prompt_logprobs" and known(self.request, name) is None:
            return "echo with logprobs" if known(self.request, "echo") else name
        return _NAMES.get(self.path, {}).get(name, name)

    def constraint(self, params: SamplingParams) -> StructuredOutputsParams | None:
        """The constraint of the request, from which vLLM has made these parameters."""
        if not known(self.request, "tools"):
            return params.structured_outputs
        from vllm_dllm.frontend.tool_calls import constrained_calls

        return constrained_calls(self.request, params.structured_outputs)


@dataclass(frozen=True)
class Endpoints:
    """The classes of requests that generate text, and our options' names without their prefix."""

    request_classes: tuple[type[Any], ...]
    options: Collection[str]

    def take(self, request: Any) -> None:
        """Note an HTTP request as vLLM's handler begins with it, before vLLM changes it.

        Misplaced options of ours, beam searches and second constraints are refused.
        """
        if not isinstance(request, self.request_classes):
            return
        self.refuse_misplaced(getattr(request, "model_extra", None) or {})
        if known(request, "use_beam_search"):
            refuse_beam_search()
        http = current.get()
        if http is None or not http.path:  # vLLM's handlers are called without its server
            http = HttpRequest()
            current.set(http)
        if http.path.endswith("/v1/messages") and request.messages:  # vLLM refuses it without
            continue_last_message(request)
        http.traced = asks_for_traces(request, http.path)
        http.constrained_by = constraining_field(request, http.path)
        if known(request, "tools"):
            from vllm_dllm.frontend.tool_calls import asks_for_calls

            http.asks_for_calls = asks_for_calls(request, http.constrained_by)
        http.request = request

    def refuse_misplaced(self, fields: Mapping[str, Any]) -> None:
        """Refuse our own options where nobody reads them: outside ``vllm_xargs``, or misnamed.

        Whatever else an endpoint does not know is ignored, as for any model.
        """
        for name, value in fields.items():
            if value is None:
                continue
            if name in _OTHER_PLACES and (name == SETTINGS_KEY or _holds_options(value)):
                problem = _OTHER_PLACES[name]
            elif name.startswith(REQUEST_PREFIX):
                problem = f'belongs in vllm_xargs: {{"vllm_xargs": {{"{cut(name)}": ...}}}}.'
            elif name in self.options:
                option = REQUEST_PREFIX + name
                problem = f'is not read here; write {{"vllm_xargs": {{"{option}": ...}}}}.'
            else:
                continue
            raise VLLMValidationError(f"{cut(name)} {problem}", parameter=cut(name))


def known(request: Any, name: str) -> Any:
    """A field of a request; None for one that its class ignores, which vLLM keeps as an extra."""
    extra = getattr(request, "model_extra", None) or ()
    return None if name in extra else getattr(request, name, None)


def _holds_options(value: Any) -> bool:
    """Whether an object, or one in it, has options of ours."""
    parts = (value, *value.values()) if isinstance(value, dict) else ()
    names = (name for part in parts if isinstance(part, dict) for name in part)
    return any(name.startswith(REQUEST_PREFIX) for name in names)


def continue_last_message(request: Any) -> None:
    """Make an answer continue a text with which the assistant ends, as in Anthropic's own API.

    There vLLM begins a new message, as here after calls.
    """
    last = request.messages[-1]
    text = last.keys() == {"role", "content"} and isinstance(last["content"], str)
    if last["role"] == "assistant" and text:
        request.continue_final_message, request.add_generation_prompt = True, False


def constraining_field(request: Any, path: str) -> str:
    """The field of a request, as it arrived, that asks for its constraint; "" if none does."""
    tools, choice = known(request, "tools") or (), known(request, "tool_choice")
    if tools and choice not in (None, "auto", "none"):
        return "tool_choice"
    form = getattr(known(request, "text"), "format", None)  # of the Responses API
    form = known(request, "response_format") or form
    if form is not None and getattr(form, "type", None) != "text":
        return _NAMES.get(path, {}).get("format", "response_format")
    strict = (getattr(getattr(tool, "function", tool), "strict", False) for tool in tools)
    asks = choice == "auto" and getattr(request, "structured_outputs", None) is None
    return STRICT if asks and any(strict) else ""


def asks_for_traces(request: Any, path: str) -> bool:
    """Whether a request asks for traces; refuses those for which its answer has no place."""
    sampling = getattr(request, "sampling_params", None)
    extra = getattr(request, "vllm_xargs", None) or getattr(sampling, "extra_args", None) or {}
    asked = [REQUEST_PREFIX + name for name in TRACING_OPTIONS if extra.get(REQUEST_PREFIX + name)]
    if not asked:
        return False
    if not path.endswith(_WITH_CHOICES):
        raise refused(
            asked[0],
            "has no effect at this endpoint, whose answers have no place for it; use "
            "/v1/chat/completions or /v1/completions",
        )
    if request.stream:
        raise refused(
            asked[0],
            'is not supported with stream, because it comes with a whole answer; send "stream": '
            "false, or watch the server (--middleware vllm_dllm.viewer.live.LivePage)",
        )
    return True
