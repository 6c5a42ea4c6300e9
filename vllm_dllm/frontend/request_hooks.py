"""The steps that this package adds to a request in the process that takes it.

The methods of `FrontEnd` are called around functions of vLLM, by the wrappers in `vllm_patches`,
in this order: `answer` around the handler of an HTTP request, `convert` around the making of its
sampling parameters, `admit` before it is handed to the engine, and `process` around the making of
the engine's request. An offline request passes through `process` alone.

A constraint is compiled in another process while other requests are served: only its own request
waits for it. A streamed request is refused before its stream begins, when it can still be given
an HTTP status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.diffusion import validate_diffusion_sampling_params

from vllm_dllm.constraints.automaton.compiled import CompiledConstraint
from vllm_dllm.frontend.admission import (
    refuse_misplaced_fields,
    resolve_options,
    sets_its_maximum,
    validate_sampling_params,
)
from vllm_dllm.frontend.contradictions import may_exclude_all, refuse_contradictions
from vllm_dllm.frontend.live_traces import asked_live
from vllm_dllm.frontend.shutdown import GracefulShutdown
from vllm_dllm.frontend.structured_output import ConstraintSettings, StructuredOutput
from vllm_dllm.frontend.tool_calls import OptionalCalls, constrained_calls, optional_calls
from vllm_dllm.frontend.traces import refuse_where_none_returns
from vllm_dllm.settings.resolved import AUTOMATON, ResolvedRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PendingConstraint(NamedTuple):
    """A constraint that is being compiled, and the most tokens its output may have (or None)."""

    automaton: Future[CompiledConstraint]
    max_tokens: int | None


class AwaitedConstraint(NamedTuple):
    """A constraint that a request has waited for.

    Attributes:
        structured_outputs: the constraint, as the request's sampling parameters hold it.
        automaton: the result of its compilation; this future is done.
    """

    structured_outputs: Any
    automaton: Future[CompiledConstraint]


# The constraints of the HTTP request that is being answered; None outside of one.
_pending: ContextVar[list[PendingConstraint] | None] = ContextVar("pending", default=None)
# What the HTTP request that is being answered is constrained by, if nothing but optional calls.
_optional: ContextVar[OptionalCalls | None] = ContextVar("optional", default=None)
# The constraint that was waited for last in this context, see `FrontEnd.admit`.
_awaited: ContextVar[AwaitedConstraint | None] = ContextVar("awaited", default=None)


class FrontEnd:
    """Takes the requests for one served model.

    Attributes:
        structured: compiles the constraints of structured outputs.
        shutdown: how this front end's server ends.
        request_classes: vLLM's classes of the requests that may come over HTTP.
        tool_parser: vLLM's name of the parser of the model's calls of tools, if it is known.
        traces_all: every request is traced, for the page of `frontend.live_traces`.
    """

    tool_parser: str | None = None
    traces_all = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Callable[[], Any],
        complete: Callable[[SamplingParams], SamplingParams],
        at_end: Callable[[Callable[[], None]], Any],
    ) -> None:
        """Collect what requests need to know of the model.

        Args:
            vllm_config: the configuration of the model's server.
            tokenizer: returns vLLM's tokenizer.
            complete: returns a copy of a request's parameters with what vLLM adds to them: the ids
                that end a text, and the ids of bad words.
            at_end: registers what is called when the engine ends.
        """
        self._complete = complete
        model, outputs = vllm_config.model_config, vllm_config.structured_outputs_config
        ends = model.try_get_generation_config().get("eos_token_id") or ()
        self.max_model_len = model.max_model_len
        self.vocabulary_size = model.get_vocab_size()
        self.served = model.dllm
        self.option_names = self.served.option_names()
        self.shutdown = GracefulShutdown()
        self.request_classes: list[type[Any]] = []
        self.structured = StructuredOutput(
            ConstraintSettings(
                tokenizer,
                vocabulary_size=self.vocabulary_size,
                at_end=at_end,
                end_tokens=frozenset([ends] if isinstance(ends, int) else ends),
                forbids_whitespace=outputs.disable_any_whitespace,
                begins_with_reasoning=(
                    bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning
                ),
            )
        )

    async def answer(self, arguments: list[Any], handle: Callable[[], Awaitable[Any]]) -> Any:
        """Answer an HTTP request; a stream does not begin before its constraint is compiled.

        Args:
            arguments: what vLLM's handler is called with.
            handle: calls the handler.

        Returns:
            The handler's answer.

        Raises:
            ShuttingDownError: the server takes no more requests.
            VLLMValidationError: the constraint of a stream is refused.
            ConstraintsBusyError: it was not compiled because of others.
        """
        self.shutdown.refuse_when_asked()
        pending: list[PendingConstraint] = []
        # Now, because vLLM's handler puts a constraint into the request.
        known = (it for it in arguments if isinstance(it, tuple(self.request_classes)))
        calls = next(map(optional_calls, known), None)
        tokens = _pending.set(pending), _optional.set(calls)
        try:
            answer = await handle()
        finally:
            _pending.reset(tokens[0])
            _optional.reset(tokens[1])
        if hasattr(answer, "__aiter__"):
            for constraint in pending:
                await self._settle(*constraint)
        return answer

    def refuse_misplaced(self, unknown: Mapping[str, Any]) -> None:
        """As `refuse_misplaced_fields`, for fields that an endpoint of this server ignores."""
        refuse_misplaced_fields(unknown, self.request_classes, self.option_names)

    def convert(
        self, request: Any, to_sampling_params: Callable[[], SamplingParams]
    ) -> SamplingParams:
        """The sampling parameters of an HTTP request, refused before an answer begins.

        vLLM validates a streamed request only once its stream has begun, with status 200, and
        ignores fields that it does not know.

        Args:
            request: of vLLM's HTTP server.
            to_sampling_params: vLLM's own conversion of the request.

        Raises:
            VLLMValidationError: the request cannot be served.
            ConstraintsBusyError: its constraint cannot be compiled now.
        """
        self.refuse_misplaced(request.model_extra or {})
        params = to_sampling_params()
        params.structured_outputs = constrained_calls(
            request, params.structured_outputs, self.structured.settings.tokenizer
        )
        self.structured.reconcile(params, _optional.get())
        resolve_options(params, self.served, sets_its_maximum(request))
        refuse_where_none_returns(request)
        validate_sampling_params(params, self.served)
        # vLLM's own check of its diffusion options. It changes the parameters and is made again
        # later, so it is given a copy.
        validate_diffusion_sampling_params(
            params.clone(), canvas_length=self.served.length, vocab_size=self.vocabulary_size
        )
        if params.bad_words or may_exclude_all(params, self.vocabulary_size):
            self._refuse_contradictions(self._complete(params))
        automaton, pending = self._submit(params), _pending.get()
        if automaton is not None and pending is not None:
            pending.append(PendingConstraint(automaton, params.max_tokens))
        return params

    async def admit(self, params: Any) -> None:
        """Wait for a request's constraint, before anything else is done for the request.

        Args:
            params: of the request; anything but sampling parameters has no constraint.

        Raises:
            VLLMValidationError: the constraint is refused.
            ConstraintsBusyError: it was not compiled because of others.
        """
        if isinstance(params, SamplingParams):
            automaton = self._submit(params)
            if automaton is not None:
                await self._settle(automaton, None)
                _awaited.set(AwaitedConstraint(params.structured_outputs, automaton))

    def process(self, make: Callable[[Any, Any], Any], prompt: Any, params: Any) -> Any:
        """Make the engine's request; a constraint's automaton takes the place of vLLM's grammar.

        Args:
            make: makes vLLM's engine request of a prompt and parameters.
            prompt: of the user.
            params: of the user; they are not changed.

        Raises:
            VLLMValidationError: the request cannot be served.
            ConstraintsBusyError: its constraint was not compiled because of others.
        """
        if not isinstance(params, SamplingParams):
            return make(prompt, params)
        automaton = self._automaton_of(params)
        # Validation stores the resolved options of the request there.
        unconstrained = params.clone()
        options = resolve_options(unconstrained, self.served)
        unconstrained.structured_outputs = None
        request = make(prompt, unconstrained)
        final = request.sampling_params
        if self.traces_all:
            final.extra_args = asked_live(final.extra_args)
        self._keep_to_the_context(final, len(request.prompt_token_ids))
        self._refuse_contradictions(final)
        if automaton is not None:
            compiled = self.structured.settle(automaton, final.max_tokens)
            if options.constraint_tokens is not None:
                most = max(options.constraint_tokens, compiled.minimum)
                final.max_tokens = min(final.max_tokens, most)
            final.extra_args = {**(final.extra_args or {}), AUTOMATON: compiled.packed}
        return request

    def _keep_to_the_context(self, params: SamplingParams, prompt_length: int) -> None:
        """Lower ``max_tokens`` to what the context leaves behind the prompt.

        What lies behind the context is never put out, and an int32 of vLLM's worker need not be
        able to hold it.

        Raises:
            VLLMValidationError: ``min_tokens`` is more than that; the request would never end.
        """
        params.max_tokens = min(params.max_tokens, self.max_model_len - prompt_length)
        if params.min_tokens > params.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must be at most {params.max_tokens}, which is what the context leaves "
                f"behind {prompt_length} prompt tokens, got {params.min_tokens}.",
                parameter="min_tokens",
                value=params.min_tokens,
            )

    def _refuse_contradictions(self, params: SamplingParams) -> None:
        if may_exclude_all(params, self.vocabulary_size):
            constrained = resolve_options(params, self.served).constrained
            refuse_contradictions(params, constrained, self.served.mask_token, self.vocabulary_size)

    def _automaton_of(self, params: SamplingParams) -> Future[CompiledConstraint] | None:
        """The constraint that `admit` has waited for.

        Offline nobody calls `admit`, and in vLLM's threads its context is not seen. There the
        constraint is submitted again and `process` waits for it, which holds up no event loop.
        """
        awaited = _awaited.get()
        if awaited is not None and awaited.structured_outputs is params.structured_outputs:
            return awaited.automaton
        return self._submit(params)

    def _submit(self, params: SamplingParams) -> Future[CompiledConstraint] | None:
        """As `StructuredOutput.submit`, with the options of a request, whose `params` stay.

        While an HTTP request is answered its constraint is not patient.
        """
        if params.structured_outputs is None:
            return None
        resolved = ResolvedRequest.given(params.extra_args)
        if resolved is None:  # a request that `convert` has not seen
            resolved = resolve_options(params.clone(), self.served)
            self.structured.reconcile(params)
        patient = _pending.get() is None
        return self.structured.submit(params, patient, resolved.constraint_depth)

    async def _settle(self, automaton: Future[CompiledConstraint], max_tokens: int | None) -> None:
        """As `StructuredOutput.settle`, but other requests are served meanwhile."""
        # Other requests may wait for the same automaton, so a request that stops waiting must not
        # cancel it. Its error is raised by the last line; retrieving it here keeps asyncio from
        # logging it as one that nobody has retrieved.
        waiting = asyncio.shield(asyncio.wrap_future(automaton))
        await asyncio.gather(waiting, return_exceptions=True)
        self.structured.settle(automaton, max_tokens)
