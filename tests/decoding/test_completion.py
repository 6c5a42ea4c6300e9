"""When a canvas may leave, and how much of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding import Canvas
from vllm_dllm.decoding.completion import decided_prefix, emitted_length, first_end

END, MASK = 7, 9


def length(
    tokens: str, ends: tuple[int, ...] = (END, -1), limit: int = 99, early: bool = True
) -> int:
    """Canvas as text: ``E`` end token, ``_`` masked, ``P`` / ``e`` prompt's tail (``e`` an end).

    ``m`` is masked, too, with the id of the end token.
    """
    ids = {"E": END, "e": END, "m": END, "_": MASK}
    canvas = Canvas(
        torch.tensor([[ids.get(c, 1) for c in tokens]]),
        torch.tensor([[c in "_m" for c in tokens]]),
        torch.tensor([[c in "Pe" for c in tokens]]),
    )
    reach = torch.minimum(first_end(canvas, torch.tensor([ends])), torch.tensor([limit]))
    assert decided_prefix(canvas).tolist() == [(tokens.replace("m", "_") + "_").index("_")]
    return int(emitted_length(canvas, reach, early)[0])


def test_named_cases() -> None:
    assert length("aEaa", early=False) == 4, "the scheduler cuts there"
    assert length("aE__", early=False) == 0
    assert length("PeE_") == 3, "an end token in the prompt's tail ends nothing"
    assert length("Pe__") == 0
    assert length("mm") == 0, "a masked position ends nothing, whatever its id is"
    assert length("aE__", ends=(-1, -1)) == 0, "switched off, or ignore_eos"
    assert length("aE__", ends=(3, END)) == 2, "any of several ids"


def test_a_limit_is_an_end() -> None:
    """The last position that ``max_tokens`` lets out."""
    assert length("aaa_", limit=3) == 3
    assert length("aa_a", limit=3) == 0
    assert length("aa__", limit=1) == 1
    assert length("aEa_", limit=3) == 2
    assert length("aa_E", limit=2) == 2
    assert length("aaaa", limit=3) == 3
    assert length("aaaa", limit=3, early=False) == 4


@given(st.lists(st.text("aE_", min_size=6, max_size=6), min_size=1, max_size=5))
def test_equals_the_loop(rows: list[str]) -> None:
    """What stands behind the first end is never shown, and a mask before it holds all back."""

    def loop(row: str) -> int:
        if "_" not in row and "E" not in row:
            return len(row)
        decided = row.split("_")[0]
        return decided.index("E") + 1 if "E" in decided else 0

    assert [length(row) for row in rows] == [loop(row) for row in rows]
