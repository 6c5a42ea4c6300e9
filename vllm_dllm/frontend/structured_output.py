"""Structured output in the front end: a request's constraint is compiled before it is admitted.

vLLM's own structured output follows a grammar token by token from left to right, but a canvas is
not written in that order. So a request's ``structured_outputs`` never leave the front end. The
constraint is compiled into an automaton, which reaches the worker in the request's extra arguments.

As in vLLM, a constraint begins after the thought, if the server has a reasoning parser and its
option ``enable_in_reasoning`` is not set. Here the parser's marker must end the thought in time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from canvas_grammar import CompiledConstraint, Constraint, ConstraintError, Thought, Vocabulary
from canvas_grammar.pool import BusyError, CompilerPool
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.logger import init_logger
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dllm.frontend import called, current
from vllm_dllm.ranges import cut, shown
from vllm_dllm.settings.resolution import AUTOMATON

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dllm.frontend import Prompt

logger = init_logger("vllm.dllm")

# vLLM's field for each kind of constraint. All but the first are our names of the kinds, too.
FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# The fields of a model's config that name tokens which are no part of an output.
UNWRITTEN = [
    f"{name}_token_id" for name in ("pad", "image", "boi", "eoi", "video", "audio", "boa", "eoa")
]
# Where a request's parameters hold the thought that its output begins with.
THOUGHT = "thought"


class ConstraintsBusyError(GracefulHTTPError):
    """Other constraints kept a constraint from being compiled; status 503 over HTTP."""


def constraint_of(structured: StructuredOutputsParams, forbids_whitespace: bool) -> Constraint:
    """The constraint that a request asks for; raises `ConstraintError` if it is not supported."""
    if structured.disable_additional_properties:
        raise ConstraintError(
            "disable_additional_properties is not supported with diffusion models: say "
            '"additionalProperties": false in the schema'
        )
    field = next(name for name in FIELDS if getattr(structured, name) is not None)
    kind = "json_schema" if field == "json" else field
    whitespace = structured.whitespace_pattern
    if whitespace is None and (
        structured.disable_any_whitespace
        or (forbids_whitespace and field in ("json", "json_object"))
    ):
        whitespace = ""  # the pattern that allows none
    return Constraint.from_value(kind, getattr(structured, field), whitespace)


def incompatible_parameters(params: SamplingParams, end_tokens: Collection[int]) -> list[str]:
    """Names of the parameters that might end a constrained output early, or keep it from ending.

    Texts in ``stop`` are no such parameter: they cut it as they cut any output.
    """
    other_stop_tokens = set(params.stop_token_ids or ()) - set(end_tokens)
    names = [f"stop_token_ids={shown(sorted(other_stop_tokens))}"] * bool(other_stop_tokens)
    names += [name for name in ("ignore_eos", "min_tokens") if getattr(params, name)]
    options = ("diffusion_pinned", "diffusion_read_only", "diffusion_constrained")
    return names + [name for name in options if (params.extra_args or {}).get(name)]


def thought_after(prompt: Prompt, name: str, tokenizer: Any, may_be_all: bool) -> Thought | None:
    """The thought that the answer to a prompt begins with, or None; `name` is that of its parser.

    Raises `ConstraintError` if the parser does not say where a thought ends.
    """
    if prompt.reasoning_ended:
        return None
    options = prompt.parser_options or {}
    parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer, **options)
    ids = list(prompt.token_ids)
    if prompt.reasoning_ended is None and parser.is_reasoning_end(ids):
        return None
    end = parser.reasoning_end_str
    marker = tokenizer.encode(end, add_special_tokens=False) if end else []
    if not end or not parser.is_reasoning_end([*ids, *marker]):
        raise ConstraintError(
            f"structured outputs after reasoning are not supported with --reasoning-parser {name}, "
            "which does not say where a thought ends; serve without it, or with "
            "--structured-outputs-config.enable_in_reasoning"
        )
    # A marker of calls may end a thought, too; what follows would be no constrained call.
    others = sorted(getattr(parser, "reasoning_end_token_ids", ()))
    return Thought(end, tuple(tokenizer.convert_ids_to_tokens(others)), may_be_all)


class StructuredOutput:
    """Compiles the constraints of requests for one model."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Callable[[], Any],
        at_end: Callable[[Callable[[], None]], Any],
    ) -> None:
        """Prepare to compile; arguments are as for `FrontEnd`."""
        model = vllm_config.model_config
        ends = model.try_get_generation_config().get("eos_token_id") or ()
        ends = {ends} if isinstance(ends, int) else {*ends}
        self.end_tokens = {*ends, tokenizer().eos_token_id}
        outputs = vllm_config.structured_outputs_config
        self.forbids_whitespace = outputs.disable_any_whitespace
        # The parser of thoughts that constraints do not cover, or "".
        self.reasoning_parser = "" if outputs.enable_in_reasoning else outputs.reasoning_parser
        self.tokenizer = tokenizer
        config = model.hf_config
        parts = (config.get_text_config(), config)
        ids = {getattr(part, name, None) for part in parts for name in UNWRITTEN}
        unwritten = {model.dllm.mask_token, *ids} - {None}
        # The pool must not refer to the renderer, which calls `close` when it is deleted.
        size = model.get_vocab_size()
        self._pool = CompilerPool(
            functools.partial(_vocabulary, tokenizer(), size, self.end_tokens, unwritten),
            logger=logger,
        )
        at_end(self._pool.close)

    def reconcile(self, params: SamplingParams, asks_for_calls: bool | None) -> None:
        """Refuse parameters that might end a constrained output early or keep it from ending.

        A constraint that only keeps optional calls valid, and was not asked for (see
        `tool_calls.asks_for_calls`), is dropped instead, because vLLM serves such a request.
        """
        names = incompatible_parameters(params, self.end_tokens)
        if names and asks_for_calls is False:
            _drop(params, names[0].partition("=")[0])
        elif names:
            raise _for_client(
                ConstraintError(
                    f"{names[0]} is not supported together with structured outputs with diffusion "
                    "models: an output ends where its constraint is satisfied, and nowhere else"
                )
            )

    def submit(
        self, params: SamplingParams, depth: int | None, prompt: Prompt
    ) -> Future[CompiledConstraint]:
        """Start compiling the constraint of a request; returns a future for `attach`.

        Equal constraints are compiled once, so this may be called again for the same request; only
        the prompt of the first call counts. Over HTTP a constraint waits only for a while until
        others are compiled: `ConstraintsBusyError`. `depth` is how deeply calls of the constraint's
        rules may nest; None for the usual number. Raises VLLMValidationError for the client.
        """
        http = current.get()
        try:
            constraint = constraint_of(params.structured_outputs, self.forbids_whitespace)
            hides = constraint.kind == "structural_tag" and params.skip_special_tokens
            if self.reasoning_parser and THOUGHT not in (known := vars(params)):
                optional = http is not None and http.asks_for_calls is not None
                known[THOUGHT] = thought_after(
                    prompt, self.reasoning_parser, self.tokenizer(), optional
                )
            thought = vars(params).get(THOUGHT)
            constraint = replace(constraint, depth=depth, hides_special=hides, thought=thought)
            patient = http is None or http.request is None
            return self._pool.submit(constraint, patient, http.client if http else "")
        except (ConstraintError, BusyError) as error:
            raise _for_client(error) from error

    async def compiled(
        self, params: SamplingParams, depth: int | None, prompt: Prompt, waits: Callable[[], None]
    ) -> None:
        """Wait until a request's constraint is compiled; arguments and errors as for `submit`.

        `waits` is called first if it has not been compiled yet.

        If it is refused and consists of optional calls that the request does not ask for, it is
        dropped.
        """
        http = current.get()
        try:
            automaton = self.submit(params, depth, prompt)
            if not automaton.done():
                waits()
                # Other requests may wait for the same automaton, so a request that stops waiting
                # must not cancel it. asyncio would log an error that is never retrieved.
                waiting = asyncio.shield(asyncio.wrap_future(automaton))
                await asyncio.gather(waiting, return_exceptions=True)
            _result(automaton)
        except VLLMValidationError as error:
            if http is None or http.asks_for_calls is not False:
                raise
            _drop(params, f"a refused constraint: {cut(repr(str(error)))}")

    @staticmethod
    def attach(
        future: Future[CompiledConstraint], params: SamplingParams, most: int | None
    ) -> None:
        """Wait for a request's automaton, and put it among the request's extra arguments.

        ``max_tokens`` is lowered to `most`, unless the shortest output takes more. `most` is None
        for a request that sets ``max_tokens``, which is refused if that is too small.
        """
        automaton = _result(future)
        assert params.max_tokens is not None
        try:
            automaton.require(params.max_tokens)
        except ConstraintError as error:
            raise _for_client(error) from error
        if most is not None:
            params.max_tokens = min(params.max_tokens, max(most, automaton.minimum))
        params.extra_args = {**(params.extra_args or {}), AUTOMATON: automaton.packed}


def _drop(params: SamplingParams, reason: str) -> None:
    """Drop a constraint that only keeps optional calls valid."""
    params.structured_outputs = None
    logger.warning_once(
        "dllm: the calls of tools are not constrained in requests with optional tools and "
        "%s, so they may be unfinished or invalid.",
        reason,
    )


def _result(future: Future[CompiledConstraint]) -> CompiledConstraint:
    """Wait for a compiled automaton; its error is raised as the client gets it."""
    # Other requests get the future's own error, too, which would grow by a traceback each time.
    problem = future.exception()
    if isinstance(problem, (ConstraintError, BusyError)):
        raise _for_client(problem)
    return future.result()


def _vocabulary(
    tokenizer: Any, size: int, ends: Collection[int], unwritten: Collection[int]
) -> Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConstraintError("structured outputs need a tokenizer with a tokenizer.json")
    return Vocabulary.read(backend.to_str(), size, ends, unwritten)


def _for_client(error: ConstraintError | BusyError) -> Exception:
    message = f"{called('structured_outputs')}: {error}."
    if isinstance(error, BusyError):
        return ConstraintsBusyError(message, HTTPStatus.SERVICE_UNAVAILABLE)
    return VLLMValidationError(message, parameter=called("structured_outputs"))
