"""A request in the process that takes it: admission, its constraint, its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from vllm_dllm.frontend.http_request import HttpRequest

# The attribute of vLLM's input processor that holds the `FrontEnd` of a diffusion model.
FRONT_END = "dllm_front_end"

# None outside an HTTP request. All tasks that answer the request share the object.
current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)


def called(name: str) -> str:
    """Return the current request's own name for a parameter of vLLM, to use in a refusal."""
    http = current.get()
    return name if http is None else http.called(name)


def refuse_beam_search() -> NoReturn:
    """Refuse a beam search."""
    from vllm_dllm.frontend.refusal import refused

    raise refused(
        "use_beam_search",
        "(LLM.beam_search) is not supported with diffusion models: it compares the beginnings of "
        "texts, and a canvas is not written from its beginning; remove it, and ask for several "
        "answers with n",
    )


class Prompt(NamedTuple):
    """The prompt that an output follows."""

    token_ids: Sequence[int]
    reasoning_ended: bool | None = None  # whether the output begins without a thought, if known
    parser_options: Mapping[str, Any] | None = None  # of the request's reasoning parser
