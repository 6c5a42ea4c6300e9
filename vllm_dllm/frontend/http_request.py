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
    """What is known of an HTTP request while it is answered.

    Attributes:
        path: of its endpoint; empty where vLLM's handlers are called without a server.
        request: as vLLM's handler got it; None for an endpoint that generates nothing.
        calls: what it is constrained by, if by nothing but optional calls.
        traced: its answer gets traces.
        queues: vLLM's queue of outputs of each of its prompts; None until the engine has taken it.
        error: why the engine was not given it, or one of its prompts.
    """

    path: str = ""
    request: Any = None
    calls: OptionalCalls | None = None
    traced: bool = False
    queues: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def admitted(self) -> bool:
        """The engine has taken one of its prompts."""
        return any(queue is not None for queue in self.queues)

    def fail(self, error: Exception) -> None:
        """Note why a prompt was not admitted, as the error that vLLM makes of it."""
        known = isinstance(error, (VLLMClientError, GracefulHTTPError, EngineDeadError))
        self.error = error if known else EngineGenerateError()


# None outside of an HTTP request. The object is shared by all tasks that answer the request.
current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)
