"""The steps that this package adds to a request in the process that receives it.

The wrappers in `vllm_seams` call the methods of `FrontEnd` around functions of vLLM, in this order:
`take` when vLLM's handler of an HTTP request begins, `admit` before a request is handed to the
engine, and `process` around the creation of the engine's request. An offline request passes through
`process` only.

A constraint is compiled in another process while other requests are served: only its own request
waits for it. The HTTP server begins no stream before its request has passed `admit` and `process`,
see `frontend.http_server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.frontend.admission import (
    AdmittedParams,
    continue_last_message,
    may_exclude_all,
    refuse_beam_search,
    refuse_contradictions,
    refuse_misplaced_fields,
    resolve_options,
    sets_its_maximum,
    validate_bad_words,
)
from vllm_dllm.frontend.http_request import HttpRequest, current
from vllm_dllm.frontend.live_traces import asked_live
from vllm_dllm.frontend.structured_output import ConstraintSettings, StructuredOutput
from vllm_dllm.frontend.tool_calls import (
    constrained_calls,
    optional_calls,
    refuse_second_constraint,
)
from vllm_dllm.frontend.traces import asks_for_traces
from vllm_dllm.settings.resolved import AUTOMATON, ResolvedRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dllm.constraints.grammar import CompiledConstraint


class AwaitedConstraint(NamedTuple):
    """A constraint that a request has waited for.

    Attributes:
        structured_outputs: the constraint, as the request's sampling parameters hold it.
        automaton: the result of its compilation; this future is done.
    """

    structured_outputs: Any
    automaton: Future[CompiledConstraint]


# The constraint that this context last waited for, see `FrontEnd.admit`.
_awaited: ContextVar[AwaitedConstraint | None] = ContextVar("awaited", default=None)


class FrontEnd:
    """Receives the requests for one served model.

    Attributes:
        structured: compiles the constraints of structured outputs.
        request_classes: vLLM's classes of the requests that may come over HTTP.
        traces_all: whether every request is traced, for the page of `frontend.live_traces`.
    """

    traces_all = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Callable[[], Any],
        at_end: Callable[[Callable[[], None]], Any],
    ) -> None:
        """Collect what requests need to know about the model.

        Args:
            vllm_config: the configuration of the model's server.
            tokenizer: returns vLLM's tokenizer.
            at_end: registers a function that is called when the engine ends.
        """
        model, outputs = vllm_config.model_config, vllm_config.structured_outputs_config
        ends = model.try_get_generation_config().get("eos_token_id") or ()
        self.max_model_len = model.max_model_len
        self.vocabulary_size = model.get_vocab_size()
        self.served = model.dllm
        self.option_names = self.served.option_names()
        self.request_classes: list[Any] = []
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

    def refuse_misplaced(self, unknown: Mapping[str, Any]) -> None:
        """Call `refuse_misplaced_fields` for fields that an endpoint of this server ignores."""
        refuse_misplaced_fields(unknown, self.request_classes, self.option_names)

    def take(self, request: Any) -> None:
        """Note an HTTP request as vLLM's handler begins with it, before vLLM changes it.

        Args:
            request: a request of vLLM's HTTP server.

        Raises:
            VLLMValidationError: it asks for something that its endpoint ignores, for a beam search,
                or for two constraints.
        """
        if not isinstance(request, tuple(self.request_classes)):
            return
        self.refuse_misplaced(getattr(request, "model_extra", None) or {})
        if getattr(request, "use_beam_search", False):
            refuse_beam_search()
        refuse_second_constraint(request)
        http = current.get()
        if http is None or not http.path:  # vLLM's handlers are called without its server
            http = HttpRequest()
            current.set(http)
        continue_last_message(request, http.path)
        http.traced = asks_for_traces(request, http.path)
        http.request, http.calls = request, optional_calls(request)

    async def admit(self, params: Any) -> Any:
        """Wait for a request's constraint, before anything else is done for the request.

        Args:
            params: the request's parameters, which are not changed; anything but sampling
                parameters has no constraint.

        Returns:
            The parameters to continue with.

        Raises:
            VLLMValidationError: an option or the constraint is refused.
            ConstraintsBusyError: other constraints kept it from being compiled.
        """
        if not isinstance(params, SamplingParams):
            return params
        prepared = self._prepare(params)
        automaton = self._submit(prepared)
        if automaton is not None:
            await _until_done(automaton)
            self.structured.settle(automaton, None)
            _awaited.set(AwaitedConstraint(prepared.structured_outputs, automaton))
        return prepared

    def process(self, make: Callable[[Any, Any], Any], prompt: Any, params: Any) -> Any:
        """Make the engine's request, with a constraint's automaton in place of vLLM's grammar.

        Args:
            make: makes vLLM's engine request from a prompt and parameters.
            prompt: the user's prompt.
            params: the user's parameters; they are not changed.

        Raises:
            VLLMValidationError: the request cannot be served.
            ConstraintsBusyError: other constraints kept its own from being compiled.
        """
        if not isinstance(params, SamplingParams):
            return make(prompt, params)
        prepared = self._prepare(params)
        automaton = self._automaton_of(prepared)
        if prepared is params:
            prepared = params.clone()
        options = resolve_options(prepared, self.served)
        prepared.structured_outputs = None
        request = make(prompt, prepared)
        final = request.sampling_params
        validate_bad_words(final)
        if self.traces_all:
            final.extra_args = asked_live(final.extra_args)
        self._keep_to_the_context(final, len(request.prompt_token_ids))
        if may_exclude_all(final, self.vocabulary_size):
            refuse_contradictions(
                final, options.constrained, self.served.mask_token, self.vocabulary_size
            )
        if automaton is not None:
            compiled = self.structured.settle(automaton, final.max_tokens)
            if options.constraint_tokens is not None:
                most = max(options.constraint_tokens, compiled.minimum)
                final.max_tokens = min(final.max_tokens, most)
            final.extra_args = {**(final.extra_args or {}), AUTOMATON: compiled.packed}
        return request

    def _prepare(self, params: SamplingParams) -> SamplingParams:
        """A copy of a request's parameters with its options resolved and its final constraint.

        Parameters that `admit` has prepared are returned unchanged.
        """
        if ResolvedRequest.given(params.extra_args) is not None:
            return params
        prepared, http = AdmittedParams.of(params), current.get() or HttpRequest()
        own_maximum = None
        if http.request is not None:
            own_maximum = sets_its_maximum(http.request)
            prepared.structured_outputs = constrained_calls(
                http.request, prepared.structured_outputs, self.structured.settings.tokenizer
            )
        self.structured.reconcile(prepared, http.calls)
        resolve_options(prepared, self.served, own_maximum)
        return prepared

    def _keep_to_the_context(self, params: SamplingParams, prompt_length: int) -> None:
        """Lower ``max_tokens`` to what the context leaves after the prompt.

        Tokens beyond the context are never put out, and their number may overflow an int32 in
        vLLM's worker.

        Raises:
            VLLMValidationError: ``min_tokens`` exceeds that, so the request would never end.
        """
        params.max_tokens = min(params.max_tokens, self.max_model_len - prompt_length)
        if params.min_tokens > params.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must be at most {params.max_tokens}, which is what the context leaves "
                f"behind {prompt_length} prompt tokens, got {params.min_tokens}.",
                parameter="min_tokens",
                value=params.min_tokens,
            )

    def _automaton_of(self, params: SamplingParams) -> Future[CompiledConstraint] | None:
        """The constraint that `admit` has waited for.

        Offline, `admit` is not called, and vLLM's threads do not see its context. In those cases
        the constraint is submitted again and `process` waits for it, which blocks no event loop.
        """
        awaited = _awaited.get()
        if awaited is not None and awaited.structured_outputs is params.structured_outputs:
            return awaited.automaton
        return self._submit(params)

    def _submit(self, params: SamplingParams) -> Future[CompiledConstraint] | None:
        """Call `StructuredOutput.submit` for parameters that `_prepare` has made.

        While an HTTP request is being answered, its constraint is not patient.
        """
        if params.structured_outputs is None:
            return None
        http, depth = current.get(), resolve_options(params, self.served).constraint_depth
        return self.structured.submit(params, http is None or http.request is None, depth)


async def _until_done(automaton: Future[CompiledConstraint]) -> None:
    """Wait until a constraint is compiled, or refused, while other requests are served."""
    # Other requests may wait for the same automaton, so a request that stops waiting must not
    # cancel it. Its error is raised by `StructuredOutput.settle`; retrieving it here keeps asyncio
    # from logging it as never retrieved.
    waiting = asyncio.shield(asyncio.wrap_future(automaton))
    await asyncio.gather(waiting, return_exceptions=True)
