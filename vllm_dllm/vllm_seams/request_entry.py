"""Wrap the places where a request enters vLLM: its input processor and its asynchronous client.

A process that receives requests makes an input processor. In its constructor such a process learns
that the model is ours, and wraps what only this process needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_dllm.frontend import FRONT_END, Prompt, current, refuse_beam_search
from vllm_dllm.settings.resolution import RESOLVED
from vllm_dllm.vllm_seams.registration import is_ours, shut_executors_down
from vllm_dllm.vllm_seams.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The arguments of vLLM's client that tell about a thought after the prompt.
REASONING = ("reasoning_ended", "reasoning_parser_kwargs")


def apply() -> None:
    """Give the input processor of one of our models a `FrontEnd`, which handles its requests."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "__init__", _make_front_end)


def _make_front_end(
    original: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any
) -> None:
    ours = is_ours(vllm_config.model_config)
    if ours:
        # Before the constructor runs, which keeps the method for an executor, too.
        self.process_inputs = _through_front_end(self, self.process_inputs)
    original(self, vllm_config, *args, **kwargs)
    if not ours:
        return
    # Imported only here, because other processes do not need these parts of vLLM.
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_dllm.frontend.front_end import FrontEnd
    from vllm_dllm.vllm_seams import outputs

    # vLLM closes what is registered there when the engine is shut down or deleted.
    at_end = self.renderer._resources.callback
    front_end = FrontEnd(vllm_config, self.renderer.get_tokenizer, at_end)
    setattr(self, FRONT_END, front_end)
    # Not every process has imported these.
    if client := sys.modules.get("vllm.v1.engine.async_llm"):
        wrap(client.AsyncLLM, "add_request", _admit)
    if offline := sys.modules.get("vllm.entrypoints.generate.beam_search.offline"):
        wrap(offline.BeamSearchOfflineMixin, "beam_search", _refuse_beam_search)
    # Importing vLLM's server would take a second.
    if "vllm.entrypoints.openai.completion.protocol" in sys.modules:
        from vllm_dllm.vllm_seams import http_endpoints

        http_endpoints.apply(vllm_config.model_config)
    outputs.keep_prompts_out()
    wrap(StatLoggerManager, "__init__", _count_by_algorithm)
    shut_executors_down()


def _through_front_end(processor: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method by which an input processor of one of our models makes an engine's request."""

    def process_inputs(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        front_end = getattr(processor, FRONT_END)
        request = front_end.process(
            lambda params: original(request_id, prompt, params, *args, **kwargs), params
        )
        made = request.sampling_params
        if made is not None and made.extra_args[RESOLVED].step_details:
            from vllm_dllm.vllm_seams import outputs

            outputs.attach_traces()
        return request

    return process_inputs


async def _admit(
    original: Callable[..., Any],
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    front_end, http = getattr(self.input_processor, FRONT_END, None), current.get()
    if front_end is None:
        return await original(self, request_id, prompt, params, *args, **kwargs)
    ids = prompt.get("prompt_token_ids", ()) if isinstance(prompt, dict) else ()
    ended, options = (kwargs.get(name) for name in REASONING)
    forget = partial(_forget_pictures, self, prompt)
    index = 0 if http is None else len(http.queues)
    if http is not None:
        http.queues.append(None)
    try:
        params = await front_end.admit(params, Prompt(ids, ended, options), forget)
        queue = await original(self, request_id, prompt, params, *args, **kwargs)
    except Exception as error:
        forget()
        if http is not None:
            http.fail(error)
        raise
    if http is not None:
        http.queues[index] = queue
    return queue


def _forget_pictures(client: Any, prompt: Any) -> None:
    """Let the next request send the pictures of this one, which has not reached the engine.

    VLLM takes every picture that it has rendered for one that the engine has. After a request that
    was refused, or while one waits for its constraint, the next with the same picture would fail
    with status 500. Ends when vLLM counts a picture as sent when it sends it.
    """
    cache = client.renderer.mm_processor_cache
    hashes = prompt.get("mm_hashes") if isinstance(prompt, dict) else None
    if cache is not None and hashes:
        for one in chain.from_iterable(hashes.values()):
            cache.invalidate(one)


def _count_by_algorithm(
    original: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any
) -> None:
    """Add a logger for one of our models wherever statistics are collected.

    vLLM does not make loggers of the entry point ``vllm.stat_logger_plugins`` for ``LLM``, and they
    make every server collect statistics, even with ``--disable-log-stats``.
    """
    original(self, vllm_config, *args, **kwargs)
    if is_ours(vllm_config.model_config):
        from vllm_dllm.metrics import add_counters

        served = vllm_config.model_config.dllm
        load = served.settings.threshold_under_load
        add_counters(self.stat_loggers, served.algorithm_names, load)


def _refuse_beam_search(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse it offline; over HTTP, `frontend.http_request` does."""
    if hasattr(self.llm_engine.input_processor, FRONT_END):
        refuse_beam_search()
    return original(self, *args, **kwargs)
