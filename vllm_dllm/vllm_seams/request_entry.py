"""Wrap the places where a request enters vLLM: its input processor and its asynchronous client.

A process that receives requests makes an input processor. In its constructor such a process learns
that the model is ours, and wraps what only this process needs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.frontend import FRONT_END, front_end_of
from vllm_dllm.settings.resolved import GREEDY_EPSILON
from vllm_dllm.vllm_seams import beam_search, http_endpoints
from vllm_dllm.vllm_seams.registration import is_ours
from vllm_dllm.vllm_seams.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def apply() -> None:
    """Give the input processor of one of our models a `FrontEnd`, which handles its requests."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "__init__", _make_front_end)
    wrap(InputProcessor, "process_inputs", _pass_front_end)


def _make_front_end(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_ours(vllm_config.model_config):
            return
        # Imported only here, because it imports parts of vLLM that other processes do not need.
        from vllm.sampling_params import SamplingParams

        from vllm_dllm.frontend.request_hooks import FrontEnd
        from vllm_dllm.vllm_seams import detokenizer, metrics, traces, worker_shutdown

        # vLLM refuses several greedy samples before it knows the model.
        wrap(SamplingParams, "_verify_greedy_sampling", lambda original: lambda self: None)
        # vLLM closes what is registered there when the engine is shut down or deleted.
        at_end = self.renderer._resources.callback
        # The front end outlives the engine, because vLLM's request classes refer to it.
        renderer = weakref.proxy(self.renderer)
        front_end = FrontEnd(vllm_config, lambda: renderer.get_tokenizer(), at_end)
        setattr(self, FRONT_END, front_end)
        _wrap_client()
        http_endpoints.apply(front_end)
        beam_search.refuse_offline()
        detokenizer.apply()
        traces.apply()
        metrics.apply()
        worker_shutdown.apply()

    return init


def _pass_front_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        front_end = front_end_of(self)
        if front_end is None:
            _refuse_greedy_samples(params)
            return original(self, request_id, prompt, params, *args, **kwargs)
        return front_end.process(
            lambda prompt, params: original(self, request_id, prompt, params, *args, **kwargs),
            prompt,
            params,
        )

    return process_inputs


def _refuse_greedy_samples(params: Any) -> None:
    """Check for another model what vLLM no longer checks once one of ours is served."""
    from vllm.sampling_params import SamplingParams

    if isinstance(params, SamplingParams) and params.n > 1 and params.temperature < GREEDY_EPSILON:
        inspect.unwrap(SamplingParams._verify_greedy_sampling)(params)


def _wrap_client() -> None:
    """Wrap the client of an HTTP server, which an offline process has not imported."""
    if "vllm.v1.engine.async_llm" not in sys.modules:
        return
    wrap(sys.modules["vllm.v1.engine.async_llm"].AsyncLLM, "add_request", _admit)


def _admit(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend.http_request import HttpRequest, current

    async def add_request(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        front_end = front_end_of(self.input_processor)
        if front_end is None:
            return await original(self, request_id, prompt, params, *args, **kwargs)
        http = current.get() or HttpRequest()
        http.queues.append(None)
        prompt_index = len(http.queues) - 1
        try:
            params = await front_end.admit(params)
            queue = await original(self, request_id, prompt, params, *args, **kwargs)
        except Exception as error:
            http.fail(error)
            raise
        http.queues[prompt_index] = queue
        return queue

    return add_request
