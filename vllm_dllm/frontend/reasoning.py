"""Thoughts in front of constrained outputs: whether there is one, and what ends it.

As in vLLM, a constraint begins after the thought, if the server has a reasoning parser and its
option ``enable_in_reasoning`` is not set. Here the parser's marker must end the thought in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from canvas_grammar import ConstraintError, Thought
from vllm.reasoning import ReasoningParserManager

if TYPE_CHECKING:
    from vllm_dllm.frontend import Prompt


def thought_after(prompt: Prompt, name: str, tokenizer: Any, may_be_all: bool) -> Thought | None:
    """The thought that the answer to a prompt begins with, or None.

    Args:
        prompt: the prompt.
        name: of the server's reasoning parser.
        tokenizer: vLLM's.
        may_be_all: see `Thought`.

    Raises:
        ConstraintError: the parser does not say where a thought ends.
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
