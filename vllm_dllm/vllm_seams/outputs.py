"""Wrap what makes answers of the engine's outputs: its detokenizer, and where traces join them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from vllm_dllm.frontend.admission import AdmittedParams
from vllm_dllm.vllm_seams.wrapping import wrap

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most four tokens.
MOST_TOKENS_OF_A_CHARACTER = 4


def keep_prompts_out() -> None:
    """Keep a prompt out of its answer if the prompt's text ends in U+FFFD.

    vLLM primes the stream of decoded tokens with the prompt. If the prompt's text ends in U+FFFD,
    the stream mistakes it for part of a character, waits, and keeps none of the prompt as known.
    """
    wrap(FastIncrementalDetokenizer, "__init__", _know_the_prompt)


def _know_the_prompt(
    original: Callable[..., None], self: Any, tokenizer: Any, request: Any
) -> None:
    original(self, tokenizer, request)
    prompt = request.prompt_token_ids
    if not isinstance(request.sampling_params, AdmittedParams) or not prompt:
        return
    end = self.tokenizer.decode(prompt[-MOST_TOKENS_OF_A_CHARACTER:], skip_special_tokens=False)
    if end.endswith(REPLACEMENT):
        text = self.tokenizer.decode(prompt, skip_special_tokens=self.skip_special_tokens)
        self.stream = StreamAfterPrompt(self.stream, text)


class StreamAfterPrompt:
    """A stream of decoded tokens whose first output begins with the text of the prompt."""

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


def attach_traces() -> None:
    """Take records of steps off the engine's outputs, before the first traced request enters it."""
    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(
    original: Callable[..., Any], self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm_dllm.frontend import traces

    live = getattr(self, traces.LIVE_TRACES, None)
    traces.take_records(self.request_states, engine_core_outputs, live)
    return original(self, engine_core_outputs, *args, **kwargs)


def _add_traces(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_dllm.frontend import traces

    completion = original(self, *args, **kwargs)
    traces.add_traces(self, completion)
    return completion
