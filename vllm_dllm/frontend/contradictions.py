"""Parameters of a request that together leave no token to choose.

Each parameter by itself is valid. Together they would set a whole row of logits to -inf in the
middle of an answer.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.exceptions import VLLMValidationError


def may_exclude_all(params: Any, vocabulary_size: int) -> bool:
    """Whether the parameters may rule out so many tokens that `refuse_contradictions` is due.

    That check builds sets of the vocabulary's size, which is too slow for every request. This one
    only counts, and doubles what it counts: vLLM may add ids to those that the user gave.

    Args:
        params: vLLM's ``SamplingParams``, with or without vLLM's additions.
        vocabulary_size: number of ids.
    """
    if params.allowed_token_ids is not None or params.logprob_token_ids:
        return True
    # A bad word has two spellings, with and without a space before it.
    lists = (params.stop_token_ids, params.logit_bias, params.bad_words, params.bad_words)
    return 2 * sum(len(ruled_out or ()) for ruled_out in lists) >= vocabulary_size


def refuse_contradictions(
    params: Any, constrained: bool, mask_token: int | None, vocabulary_size: int
) -> None:
    """Refuse parameters that together leave no token to choose.

    Args:
        params: vLLM's ``SamplingParams``, with vLLM's own additions: the ids that end a text, and
            those of bad words.
        constrained: only ``logprob_token_ids`` may be chosen.
        mask_token: an id that is never chosen, or None.
        vocabulary_size: number of ids.

    Raises:
        VLLMValidationError: names the parameters.
    """
    vocabulary = set(range(vocabulary_size))
    allowed = params.logprob_token_ids if constrained else params.allowed_token_ids
    biases = params.logit_bias or {}
    ruled_out = {
        "logprob_token_ids" if constrained else "allowed_token_ids": (
            set() if allowed is None else vocabulary - set(allowed)
        ),
        "bad_words": {word[0] for word in params.bad_words_token_ids or () if len(word) == 1},
        "logit_bias": {token for token, bias in biases.items() if bias == -math.inf},
        "min_tokens": set(params.all_stop_token_ids) if params.min_tokens > 0 else set(),
    }
    if vocabulary - {mask_token} - set().union(*ruled_out.values()):
        return
    names = [name for name, tokens in ruled_out.items() if tokens & vocabulary]
    raise VLLMValidationError(
        f"no token is left to choose, given {' and '.join(names)}"
        + (" (min_tokens excludes whatever ends a text)" if "min_tokens" in names else "")
        + "; allow more tokens.",
        parameter=names[-1],
    )
