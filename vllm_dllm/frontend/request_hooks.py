"""What happens to a request in the process that takes it, beside what vLLM does.

Each method here is given one of vLLM's functions and returns what stands in its place; `compat`
knows the places. A constraint is compiled while others are served: nothing waits for it but its own
request, and a streamed one is refused before its stream has begun, with a status.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.diffusion import validate_diffusion_sampling_params

from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.service.turns import NOBODY, Client
from vllm_dllm.frontend import FRONT_END
from vllm_dllm.frontend.admission import refuse_misplaced, validate_sampling_params
from vllm_dllm.frontend.contradictions import may_exclude_all, refuse_contradictions
from vllm_dllm.frontend.structured_output import (
    AUTOMATON,
    ConstraintsBusyError,
    Model,
    StructuredOutput,
)
from vllm_dllm.vllm_patches.ending import Ending

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What the requests of one HTTP call wait for: automata, and the tokens that each may put out.
Awaited = list[tuple[Future[TokenAutomaton], int | None]]
_awaited: ContextVar[Awaited | None] = ContextVar("awaited", default=None)
# Who sent the HTTP request that is being answered; offline everybody is nobody.
_client: ContextVar[Client] = ContextVar("client", default=NOBODY)
# The constraint that was waited for last, as its request holds it, and what came of it.
_admitted: ContextVar[tuple[Any, Future[TokenAutomaton]] | None] = ContextVar(
    "admitted", default=None
)
RETRY_SECONDS = 2


def no_beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of what begins a beam search; never calls it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise VLLMValidationError(
            "use_beam_search (LLM.beam_search) is not supported with diffusion models: it compares "
            "the beginnings of texts, and a canvas is not written from its beginning.",
            parameter="use_beam_search",
        )

    return refuse


def refusing_beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LLM.beam_search``, where the model is ours."""

    def search(self: Any, *args: Any, **named: Any) -> Any:
        ours = hasattr(self.llm_engine.input_processor, FRONT_END)
        return (no_beam_search(original) if ours else original)(self, *args, **named)

    return search


class FrontEnd:
    """Of one served model."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Callable[[], Any],
        completed: Callable[[SamplingParams], SamplingParams],
    ) -> None:
        """What requests to a model need to know of it.

        Args:
            vllm_config: its configuration.
            tokenizer: gives vLLM's tokenizer.
            completed: a copy of a request's parameters with what vLLM adds to them: the ids that
                end a text, and those of bad words.
        """
        self.completed = completed
        model, outputs = vllm_config.model_config, vllm_config.structured_outputs_config
        ends = model.try_get_generation_config().get("eos_token_id") or ()
        self.max_model_len = model.max_model_len
        self.vocabulary = model.get_vocab_size()
        self.served = model.dllm
        self.ending = Ending()
        self.endpoints: list[type[Any]] = []  # the classes of requests that HTTP may bring
        self.structured = StructuredOutput(
            Model(
                tokenizer,
                vocabulary=self.vocabulary,
                ends=frozenset([ends] if isinstance(ends, int) else ends),
                no_space=outputs.disable_any_whitespace,
                reasons=bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning,
            )
        )

    def to_sampling_params(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An HTTP request's parameters, refused while there is a status to refuse them with.

        vLLM validates a streamed request when its stream has begun, with status 200, and passes
        over fields that it does not know.
        """

        def convert(request: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_misplaced(request, self.endpoints)
            params = original(request, *args, **kwargs)
            validate_sampling_params(params, self.served)
            # vLLM's own check of its options. It changes what it checks, and is made again later.
            validate_diffusion_sampling_params(
                params.clone(), canvas_length=self.served.length, vocab_size=self.vocabulary
            )
            if params.bad_words or may_exclude_all(params, self.vocabulary):
                self._refuse_contradictions(self.completed(params))
            future, awaited = self.structured.submit(params, _client.get()), _awaited.get()
            if future is not None and awaited is not None:
                awaited.append((future, params.max_tokens))
            return params

        return convert

    def _refuse_contradictions(self, params: SamplingParams) -> None:
        if may_exclude_all(params, self.vocabulary):
            constrained = bool(self.served.options(params.extra_args).constrained)
            refuse_contradictions(params, constrained, self.served.mask_token, self.vocabulary)

    def answer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A handler of HTTP requests: a stream does not begin before its constraint is known."""

        async def handle(*args: Any, **kwargs: Any) -> Any:
            self.ending.refuse_when_ending()
            awaited: Awaited = []
            asked = [*args, *kwargs.values()]
            before = _awaited.set(awaited), _client.set(client_of(asked))
            try:
                answer = await original(*args, **kwargs)
            finally:
                _awaited.reset(before[0])
                _client.reset(before[1])
            if hasattr(answer, "__aiter__"):
                for future, budget in awaited:
                    await self._settled(future, budget)
            return answer

        return handle

    async def admit(self, params: Any) -> None:
        """Wait for a request's constraint, before anything else is done for it."""
        if isinstance(params, SamplingParams):
            future = self.structured.submit(params, _client.get())
            if future is not None:
                await self._settled(future, None)
                _admitted.set((params.structured_outputs, future))

    async def _settled(self, future: Future[TokenAutomaton], budget: int | None) -> None:
        """As `StructuredOutput.settled`, while others are served."""
        # Others may wait for it too: who stops waiting must not cancel it. And an error is heard of
        # below, not here: one that nobody hears of asyncio would write into the log.
        waiting = asyncio.shield(asyncio.wrap_future(future))
        await asyncio.gather(waiting, return_exceptions=True)
        self.structured.settled(future, budget)

    def process(self, original: Callable[..., Any], prompt: Any, params: Any) -> Any:
        """The engine's request; its automaton takes the place of vLLM's grammar.

        Args:
            original: makes it from these two.
            prompt: of the user.
            params: of the user; not changed.
        """
        if not isinstance(params, SamplingParams):
            return original(prompt, params)
        future = self._future(params)
        plain = params
        if future is not None:
            plain = params.clone()
            plain.structured_outputs = None
        request = original(prompt, plain)
        final, asked = request.sampling_params, len(request.prompt_token_ids)
        # What lies behind the context is never put out, and an int32 of vLLM's worker need not
        # hold it.
        final.max_tokens = min(final.max_tokens, self.max_model_len - asked)
        if final.min_tokens > final.max_tokens:  # it would never end
            raise VLLMValidationError(
                f"min_tokens must be at most {final.max_tokens}, which is what the context leaves "
                f"behind {asked} prompt tokens, got {final.min_tokens}.",
                parameter="min_tokens",
                value=final.min_tokens,
            )
        self._refuse_contradictions(final)
        if future is not None:
            packed = self.structured.settled(future, final.max_tokens).to_bytes()
            final.extra_args = {**(final.extra_args or {}), AUTOMATON: packed}
        return request

    def _future(self, params: SamplingParams) -> Future[TokenAutomaton] | None:
        """What `admit` has waited for; else it is waited for here, which is not the event loop."""
        admitted = _admitted.get()
        if admitted is not None and admitted[0] is params.structured_outputs:
            return admitted[1]
        return self.structured.submit(params, _client.get())

    def say_when_to_retry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The server's answer to an error, with a header for clients who were told to come back."""

        async def answer(request: Any, error: Exception) -> Any:
            response = await original(request, error)
            if isinstance(error, ConstraintsBusyError):
                response.headers["Retry-After"] = str(RETRY_SECONDS)
            return response

        return answer


def client_of(asked: list[Any]) -> Client:
    """Who sent an HTTP request, for taking turns.

    Where the server checks keys, a client is a key, and its addresses take turns among themselves.
    Elsewhere a client is an address, and the keys it shows, which may be invented, do so.

    Args:
        asked: what a handler of the server is called with; Starlette's request is among it.
    """
    for request in asked:
        if hasattr(request, "client") and hasattr(request, "headers"):
            address = request.client.host if request.client else ""
            shown = request.headers.get("authorization", "").encode(errors="replace")
            key = hashlib.sha256(shown).hexdigest()[:16] if shown else ""
            given = getattr(getattr(request.app.state, "args", None), "api_key", None)
            checked = any(given or [os.environ.get("VLLM_API_KEY")])
            return (key, address) if checked else (address, key)
    return NOBODY
