"""The steps that this package adds to a request in the process that receives it.

A request passes from vLLM to this package at most three times: an HTTP request when vLLM's handler
begins with it (`http_request.Endpoints.take`), then in the server's client (`FrontEnd.admit`), and
then where vLLM makes the engine's request (`FrontEnd.process`). An offline request passes through
`process` only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.frontend import Prompt, current
from vllm_dllm.frontend.admission import (
    AdmittedParams,
    refuse_contradictions,
    validate_bad_words,
    validate_sampling_params,
)
from vllm_dllm.frontend.refusal import refused
from vllm_dllm.settings.resolution import RESOLVED, ResolvedRequest, StepDetails

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dllm.frontend.structured_output import StructuredOutput


class FrontEnd:
    """Receives the requests for one served model."""

    traces_all = False  # whether every request is traced, for the live page

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Callable[[], Any],
        at_end: Callable[[Callable[[], None]], Any],
    ) -> None:
        """Prepare for requests; `at_end` registers what is called when the engine ends."""
        self.vocabulary_size = vllm_config.model_config.get_vocab_size()
        self.served = vllm_config.model_config.dllm
        self._config, self._tokenizer, self._at_end = vllm_config, tokenizer, at_end

    @cached_property
    def structured(self) -> StructuredOutput:
        """The compiler of structured-output constraints."""
        from vllm_dllm.frontend.structured_output import StructuredOutput

        return StructuredOutput(self._config, self._tokenizer, self._at_end)

    async def admit(self, params: Any, prompt: Prompt, waits: Callable[[], None]) -> Any:
        """Wait for a request's constraint; returns the parameters to continue with.

        The constraint is compiled in another process while other requests are served, which may
        overtake this one: `waits` is called before, unless it has been compiled already. Raises
        VLLMValidationError for a refusal, and ConstraintsBusyError as `StructuredOutput.submit`.
        """
        if not isinstance(params, SamplingParams):
            return params
        prepared, resolved = self._prepare(params)
        if prepared.structured_outputs is not None:
            await self.structured.compiled(prepared, resolved.constraint_depth, prompt, waits)
        return prepared

    def process(self, make: Callable[[Any], Any], params: Any) -> Any:
        """Make the engine's request, with a constraint's automaton in place of vLLM's grammar.

        Offline, this waits for the automaton; no event loop is blocked. Errors are as for `admit`.
        `make` makes vLLM's request from parameters. `params` are the user's, which are not changed,
        or what `admit` has returned.
        """
        if not isinstance(params, SamplingParams):
            return make(params)
        prepared, resolved = self._prepare(params)
        unconstrained, constraint = copy.copy(prepared), prepared.structured_outputs
        unconstrained.structured_outputs = None
        request = make(unconstrained)
        final = request.sampling_params
        validate_bad_words(final)
        self._keep_to_the_context(final, len(request.prompt_token_ids))
        refuse_contradictions(
            final, resolved.constrained, self.served.mask_token, self.vocabulary_size
        )
        if constraint is not None:
            prompt = Prompt(request.prompt_token_ids)
            automaton = self.structured.submit(prepared, resolved.constraint_depth, prompt)
            self.structured.attach(automaton, final, resolved.constraint_tokens)
        return request

    def _prepare(self, params: SamplingParams) -> tuple[AdmittedParams, ResolvedRequest]:
        """A validated copy of a request's parameters, with its final constraint; its options."""
        if isinstance(params, AdmittedParams):  # `admit` has prepared them
            return params, params.extra_args[RESOLVED]
        prepared, http = AdmittedParams.of(params), current.get()
        if self.served.end_tokens:
            prepared.update_from_generation_config({"eos_token_id": list(self.served.end_tokens)})
        if http is not None and http.path.endswith("/generative_scoring"):
            # A causal model scores labels given the prompt alone, whatever the temperature. That is
            # the first pass, before anything beside them is decided.
            prepared.temperature, prepared.extra_args = 0.0, {"diffusion_max_steps": 1}
        own_maximum, asks_for_calls = params.max_tokens is not None, None
        if http is not None and http.request is not None:
            own_maximum, asks_for_calls = http.sets_its_maximum(), http.asks_for_calls
            prepared.structured_outputs = http.constraint(params)
            if getattr(http.request, "prompt_logprobs", None) is None and http.is_chat:
                prepared.prompt_logprobs = None  # which vLLM adds to `echo`
        if prepared.structured_outputs is not None:
            self.structured.reconcile(prepared, asks_for_calls)
        details = StepDetails.LIVE if self.traces_all else StepDetails.NOTHING
        resolved = validate_sampling_params(
            prepared, self.served, own_maximum, details, asks_for_calls is False
        )
        prepared.extra_args = {**(prepared.extra_args or {}), RESOLVED: resolved}
        return prepared, resolved

    def _keep_to_the_context(self, params: SamplingParams, prompt_length: int) -> None:
        """Lower ``max_tokens`` to what the context leaves after the prompt.

        Tokens beyond the context are never put out, and their number may overflow an int32 in
        vLLM's worker. With a larger ``min_tokens`` the request would never end: it is refused.
        """
        # With ``--max-model-len auto`` vLLM fits the length into memory when the engine starts.
        room = self._config.model_config.max_model_len - prompt_length
        params.max_tokens = min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise refused(
                "min_tokens",
                f"must be at most {params.max_tokens}, which is what the context leaves after "
                f"{prompt_length} prompt tokens, got {params.min_tokens}",
                params.min_tokens,
            )
