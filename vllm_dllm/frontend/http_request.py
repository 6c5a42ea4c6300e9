"""The HTTP request that is being answered, from its handler to the engine and back."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_dllm.frontend.tool_calls import OptionalCalls


@dataclass
class HttpRequest:
    """What is known about an HTTP request while it is being answered.

    Attributes:
        path: path of its endpoint; empty if vLLM's handlers are called without a server.
        request: the request as vLLM's handler received it; None for an endpoint that generates
            nothing.
        calls: the constraint, if the request is constrained by optional tool calls only.
        traced: whether its answer gets traces.
        queues: vLLM's output queue of each of its prompts; None until the engine has taken it.
        error: why the request, or one of its prompts, was not given to the engine.
    """

    path: str = ""
    request: Any = None
    calls: OptionalCalls | None = None
    traced: bool = False
    queues: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def admitted(self) -> bool:
        """Note that the engine has taken one of its prompts."""
        return any(queue is not None for queue in self.queues)

    def fail(self, error: Exception) -> None:
        """Note why a prompt was not admitted, as the error that vLLM makes from it."""
        known = isinstance(error, (VLLMClientError, GracefulHTTPError, EngineDeadError))
        self.error = error if known else EngineGenerateError()


# None outside an HTTP request. All tasks that answer the request share the object.
current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)
