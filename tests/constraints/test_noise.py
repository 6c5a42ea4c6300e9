"""The noise of paths and that of tokens that are drawn without a constraint."""

from __future__ import annotations

import torch
from canvas_grammar.decoding.best_path import FIRST_RANGE_INDEX
from canvas_grammar_support import noise

from vllm_dllm.ops.noise import keyed
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX


def test_they_are_one_function_at_different_indices() -> None:
    """So a token that was drawn without a constraint is independent of the path."""
    keys = keyed.row_keys(torch.arange(8), torch.arange(8), 3)
    assert noise.row_keys(torch.arange(8), torch.arange(8), 3).equal(keys)
    index = torch.tensor([0, 7, FIRST_GROUP_INDEX, FIRST_RANGE_INDEX])
    assert noise.gumbel(keys, index).equal(keyed.gumbel(keys, index))
    # A group stands at the index of its first id, and ids are fewer than that.
    assert FIRST_RANGE_INDEX - FIRST_GROUP_INDEX >= 1 << 28
