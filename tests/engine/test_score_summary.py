"""What is kept of rows of scores is what the rows would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors

from tests.support.score_rows import NAMED, VOCABULARY, assert_reported, random_rows
from vllm_dllm.engine import logprobs
from vllm_dllm.engine.logprobs import ScoreSummary, summarize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("asked", [0, 3, VOCABULARY, NAMED])
def test_a_summary_is_that_of_the_rows(dtype: torch.dtype, normalizes: bool, asked: Any) -> None:
    rows = random_rows(50, dtype)
    draw = torch.Generator().manual_seed(1)
    candidates = torch.randint(VOCABULARY, (50, 3), generator=draw)
    candidates[:2] = torch.tensor([[11, 12, 5], [20, 6, 21]])  # ties, and a token at -inf
    ids = torch.tensor(asked) if isinstance(asked, tuple) else asked
    found = ScoreSummary.from_scores(rows, candidates, ids, normalizes)
    for column in range(3):
        tokens = candidates[:, column]
        score, rank, known = found.chosen(tokens)
        assert bool(known.all())
        table = LogprobsTensors(
            torch.cat([tokens[:, None], found.ids], 1),
            torch.cat([score[:, None], found.scores], 1),
            rank,
        )
        assert_reported(table.tolists(), rows, tokens, asked, normalizes)
    assert not found.chosen(candidates.amax(1) + 1)[2].any()


def test_rows_are_summarized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a summary for which all rows of a canvas are in float32 together."""
    rows, candidates = random_rows(10), torch.arange(10)[:, None]
    whole = ScoreSummary.from_scores(rows, candidates, 2, True)
    sizes = []

    def scores_of(index: int, positions: slice) -> torch.Tensor:
        sizes.append(len(rows[positions]))
        return rows[positions]

    monkeypatch.setattr(logprobs, "SUMMARY_BYTES", 4 * 4 * VOCABULARY + 3)
    parts = summarize(scores_of, candidates[None], [0], (2, True), 4 * VOCABULARY)
    assert sizes == [4, 4, 2]
    for name, tensor in vars(whole).items():
        assert torch.equal(getattr(parts, name)[0], tensor), name
