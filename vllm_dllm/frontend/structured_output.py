"""Structured output at the front end: what a request asks for, compiled before it is admitted.

vLLM's own way (a grammar that engine steps advance token by token) is not for canvases, so
`structured_outputs` never leaves the front end: its automaton travels in the request's place for
extra arguments, and the worker follows it (`constrained`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import BusyError, ConstraintError
from vllm_dllm.constraints.service.pool import CompilerPool
from vllm_dllm.constraints.service.turns import NOBODY, Client
from vllm_dllm.settings.ranges import shown

# Where a request carries its automaton; admission refuses the name from users, as any unknown one.
AUTOMATON = "diffusion_automaton"
# vLLM's names of constraints to ours.
KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
NO_SPACE = ""


class ConstraintsBusyError(GracefulHTTPError):
    """A constraint that was not compiled because of others; status 503 over HTTP."""

    def __init__(self, error: BusyError) -> None:
        super().__init__(f"structured_outputs: {error}.", HTTPStatus.SERVICE_UNAVAILABLE)


def unpacked(extra_args: Mapping[str, Any] | None) -> tuple[bytes | None, dict[str, Any]]:
    """A request's automaton, or None, and its other extra arguments."""
    others = dict(extra_args or {})
    return others.pop(AUTOMATON, None), others


def constraint_of(structured: Any, no_space: bool) -> Constraint:
    """What vLLM's ``StructuredOutputsParams`` ask for.

    Args:
        structured: the parameters.
        no_space: the server wants JSON without white space.

    Raises:
        ConstraintError: it is not served, with the reason.
    """
    if structured.disable_additional_properties:
        raise ConstraintError(
            "disable_additional_properties is not supported with diffusion models: say "
            '"additionalProperties": false in the schema'
        )
    given = next(name for name in KINDS if getattr(structured, name) is not None)
    whitespace = structured.whitespace_pattern
    if whitespace is None and (structured.disable_any_whitespace or (no_space and given == "json")):
        whitespace = NO_SPACE
    return Constraint.of(KINDS[given], getattr(structured, given), whitespace)


def refuse_beside(params: Any, ends: Iterable[int]) -> None:
    """Refuse parameters under which a constrained output might be cut short, or go on.

    Args:
        params: vLLM's ``SamplingParams``.
        ends: ids that end a text.

    Raises:
        ConstraintError: names the parameter.
    """
    others = set(params.stop_token_ids or ()) - set(ends)
    beside = {
        "stop": bool(params.stop),
        f"stop_token_ids={shown(sorted(others))}": bool(others),
        "ignore_eos": params.ignore_eos,
        "min_tokens": params.min_tokens > 0,
        **{
            name: bool((params.extra_args or {}).get(name))
            for name in ("diffusion_pinned", "diffusion_read_only", "diffusion_constrained")
        },
    }
    for name, given in beside.items():
        if given:
            raise ConstraintError(
                f"{name} is not supported beside structured outputs with diffusion models: an "
                "output ends where its constraint is satisfied, and nowhere else"
            )


@dataclass(frozen=True)
class Model:
    """What constraints must know of a served model.

    Attributes:
        tokenizer: gives vLLM's tokenizer.
        vocabulary: number of ids of its head.
        ends: ids that end a text, beside the tokenizer's.
        no_space: the server wants JSON without white space.
        reasons: its outputs begin with reasoning that no constraint is for.
    """

    tokenizer: Callable[[], Any]
    vocabulary: int
    ends: frozenset[int]
    no_space: bool = False
    reasons: bool = False


class StructuredOutput:
    """Compiles what requests ask for. One in a process that takes requests."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._compiler: CompilerPool | None = None
        self._problem: str | None = None

    def warm(self) -> None:
        """Start what compiles, in the background: the first request need not wait for it."""
        document = self._document()  # here, because a tokenizer is not for two threads
        threading.Thread(target=self._warm, args=(document,), daemon=True).start()

    def _warm(self, document: str | None) -> None:
        with contextlib.suppress(ConstraintError):  # requests will hear of it
            self._ready(document).warm()

    def _document(self) -> str | None:
        """The tokenizer's ``tokenizer.json``, if it has one."""
        backend = getattr(self.model.tokenizer(), "backend_tokenizer", None)
        return None if backend is None else backend.to_str()

    def _ready(self, document: str | None = None) -> CompilerPool:
        """The compiler; made when it is needed.

        Raises:
            ConstraintError: the tokenizer is of a kind that is not known.
        """
        with self._lock:
            if self._problem is not None:
                raise ConstraintError(self._problem)
            if self._compiler is None:
                try:
                    self._compiler = CompilerPool(self._vocabulary(document or self._document()))
                except ConstraintError as error:
                    self._problem = str(error)
                    raise
            return self._compiler

    def _vocabulary(self, document: str | None) -> Vocabulary:
        if document is None:
            raise ConstraintError("they need a tokenizer with a tokenizer.json")
        ends = self.model.ends | {self.model.tokenizer().eos_token_id}
        return Vocabulary.read(document, self.model.vocabulary, ends)

    def submit(self, params: Any, client: Client = NOBODY) -> Future[TokenAutomaton] | None:
        """The automaton that a request's output must follow, later; None where it asks for none.

        Equal constraints are compiled once, so this may be asked again.

        Args:
            params: of the request.
            client: who sent it; clients take turns.

        Raises:
            VLLMValidationError: the request cannot be served; so may the future, see `settled`.
            ConstraintsBusyError: it cannot be served now; so may the future.
        """
        if params.structured_outputs is None:
            return None
        try:
            if self.model.reasons:
                raise ConstraintError(
                    "structured outputs behind reasoning are not supported with diffusion models; "
                    "serve without --reasoning-parser, or with "
                    "--structured-outputs-config.enable_in_reasoning"
                )
            constraint = constraint_of(params.structured_outputs, self.model.no_space)
            compiler = self._ready()
            refuse_beside(params, compiler.vocabulary.ends)
            return compiler.submit(constraint, client)
        except ConstraintError as error:
            raise _refusal(error) from error
        except BusyError as error:
            raise ConstraintsBusyError(error) from error

    @staticmethod
    def settled(future: Future[TokenAutomaton], budget: int | None) -> TokenAutomaton:
        """What was compiled; waits for it.

        Args:
            future: from `submit`.
            budget: tokens that may be put out, or None for as many as it takes.

        Raises:
            VLLMValidationError: there is no automaton, or the budget is too small for it.
            ConstraintsBusyError: it was not compiled because of others.
        """
        # Not raised itself: others get the same one, and each time it would grow by a traceback.
        problem = future.exception()
        if isinstance(problem, ConstraintError):
            raise _refusal(problem)
        if isinstance(problem, BusyError):
            raise ConstraintsBusyError(problem)
        automaton = future.result()
        try:
            if budget is not None:
                automaton.require(budget)
        except ConstraintError as error:
            raise _refusal(error) from error
        return automaton


def _refusal(error: ConstraintError) -> VLLMValidationError:
    return VLLMValidationError(f"structured_outputs: {error}.", parameter="structured_outputs")
