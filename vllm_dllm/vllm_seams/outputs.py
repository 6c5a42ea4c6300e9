"""Wrap what makes answers and metrics of the engine's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_seams.registration import is_ours
from vllm_dllm.vllm_seams.wrapping import wrap

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most four tokens.
MOST_TOKENS_OF_A_CHARACTER = 4


def apply() -> None:
    """Wrap what any request of our models needs."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    from vllm.v1.metrics.loggers import StatLoggerManager

    wrap(FastIncrementalDetokenizer, "__init__", _know_the_prompt)
    wrap(StatLoggerManager, "__init__", _add_counters)


def carry_traces() -> None:
    """Take records of steps off the engine's outputs, see `frontend.traces`.

    The first request that is traced calls this, before the engine has it.
    """
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        live = getattr(self, traces.LIVE_TRACES, None)
        traces.take_records(self.request_states, engine_core_outputs, live)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _add_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = original(self, *args, **kwargs)
        traces.add_traces(self, completion)
        return completion

    return _new_completion_output


def _add_counters(original: Callable[..., None]) -> Callable[..., None]:
    """Add a logger for one of our models wherever statistics are collected.

    vLLM does not make loggers of the entry point ``vllm.stat_logger_plugins`` for ``LLM``, and they
    make every server collect statistics, even with ``--disable-log-stats``.
    """

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_ours(vllm_config.model_config):
            return
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        from vllm_dllm.metrics import AlgorithmCounters

        # vLLM makes a logger, or uses one that it is given, such as Ray's.
        *_, vllms = (each for each in self.stat_loggers if isinstance(each, PrometheusStatLogger))
        names = vllm_config.model_config.dllm.algorithm_names
        self.stat_loggers.insert(0, AlgorithmCounters(vllms, names))

    return init


def _know_the_prompt(original: Callable[..., None]) -> Callable[..., None]:
    from vllm_dllm.frontend.admission import AdmittedParams

    def init(self: Any, tokenizer: Any, request: Any) -> None:
        original(self, tokenizer, request)
        prompt = request.prompt_token_ids
        if not isinstance(request.sampling_params, AdmittedParams) or not prompt:
            return
        end = self.tokenizer.decode(prompt[-MOST_TOKENS_OF_A_CHARACTER:], skip_special_tokens=False)
        if end.endswith(REPLACEMENT):
            text = self.tokenizer.decode(prompt, skip_special_tokens=self.skip_special_tokens)
            self.stream = StreamAfterPrompt(self.stream, text)

    return init


class StreamAfterPrompt:
    """A stream of decoded tokens whose first output begins with the text of the prompt.

    vLLM primes the stream with the prompt. If the prompt's text ends in U+FFFD, the stream mistakes
    it for part of a character, waits, and keeps none of the prompt as known.
    """

    def __init__(self, stream: Any, prompt: str) -> None:
        self._stream = stream
        self._prompt: str | None = prompt

    def step(self, tokenizer: Any, token_id: int) -> str | None:
        """The text that a token adds; None while a character is incomplete."""
        text: str | None = self._stream.step(tokenizer, token_id)
        if text is None or self._prompt is None:
            return text
        prompt, self._prompt = self._prompt, None
        if text.startswith(prompt):
            return text.removeprefix(prompt)
        # The answer has completed the prompt's last character.
        return text.removeprefix(prompt.rstrip(REPLACEMENT))
