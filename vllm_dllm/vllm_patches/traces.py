"""Records of steps on their way from the engine to a request's outputs, see `frontend.traces`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

from vllm_dllm.vllm_patches.wrapping import wrap

_OPENAI = "vllm.entrypoints.openai"


def apply() -> None:
    """Let the front end of one of our models take the records of steps off the engine's outputs."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    wrap(OutputProcessor, "process_outputs", _take_records)
    wrap(RequestState, "_new_completion_output", _add_traces)


def _take_records(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import live_traces, traces

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        live = live_traces.live_traces_of(self)
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


def apply_to_http_server() -> None:
    """Let answers over HTTP have what their requests asked for."""
    chat = import_module(f"{_OPENAI}.chat_completion.serving").OpenAIServingChat
    wrap(chat, "chat_completion_full_generator", _whole_chat)
    wrap(chat, "chat_completion_stream_generator", _streamed_chat)
    completion = import_module(f"{_OPENAI}.completion.serving").OpenAIServingCompletion
    wrap(completion, "request_output_to_completion_response", _whole_completion)
    wrap(completion, "completion_stream_generator", _streamed_completion)


def _whole_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        last: dict[int, Any] = {}

        async def noted() -> AsyncIterator[Any]:
            async for result in result_generator:
                last.update((completion.index, completion) for completion in result.outputs)
                yield result

        if not traces.is_asked(request):
            return await original(self, request, result_generator, *args, **kwargs)
        answer = await original(self, request, noted(), *args, **kwargs)
        for choice in getattr(answer, "choices", ()):
            _set_fields(choice, last.get(choice.index))
        return answer

    return chat_completion_full_generator


def _whole_completion(original: Callable[..., Any]) -> Callable[..., Any]:

    def request_output_to_completion_response(
        self: Any, final_res_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answer = original(self, final_res_batch, *args, **kwargs)
        completions = [each for result in final_res_batch for each in result.outputs]
        for choice, completion in zip(answer.choices, completions, strict=True):
            _set_fields(choice, completion)
        return answer

    return request_output_to_completion_response


def _set_fields(choice: Any, completion: Any) -> None:
    """Add to one choice of one answer, whose model allows fields that it does not know."""
    from vllm_dllm.frontend import traces

    for name, value in traces.fields_of(completion).items():
        setattr(choice, name, value)


def _streamed_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    async def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        stream = traces.TracedStream()

        async def noted() -> AsyncIterator[Any]:
            async for result in result_generator:
                for completion in result.outputs:
                    stream.take(completion.index, completion)
                yield result

        asked = traces.is_asked(request)
        source = noted() if asked else result_generator
        async for chunk in original(self, request, source, *args, **kwargs):
            yield stream.add(chunk) if asked else chunk

    return chat_completion_stream_generator


def _streamed_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend import traces

    async def completion_stream_generator(
        self: Any, request: Any, inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        stream, choices = traces.TracedStream(), request.n or 1

        async def noted() -> AsyncIterator[Any]:
            async for prompt, result in result_generator:
                for completion in result.outputs:
                    stream.take(prompt * choices + completion.index, completion)
                yield prompt, result

        asked = traces.is_asked(request)
        source = noted() if asked else result_generator
        async for chunk in original(self, request, inputs, source, *args, **kwargs):
            yield stream.add(chunk) if asked else chunk

    return completion_stream_generator
