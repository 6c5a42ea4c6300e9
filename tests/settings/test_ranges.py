"""Numbers that users set: what is in range, and what the error says."""

from __future__ import annotations

import time

from vllm_dllm.ranges import nearest, shown


def test_what_is_long_is_cut_before_it_is_compared_or_quoted() -> None:
    """A name of 20 MB took 2 s, in which no other request was heard."""
    long = "a" * 20_000_000
    begin = time.process_time()
    for quoted in (
        nearest(long, ["algorithm"]),
        shown(long),
        shown([long, long]),
        shown({long + str(n): n for n in range(3)}),
    ):
        assert len(quoted) < 1000
    assert time.process_time() - begin < 0.5


def test_a_mapping_is_shown_by_its_first_entries() -> None:
    assert shown({"b": 1, "a": 2}) in ("{'b': 1, 'a': 2}", "{'a': 2, 'b': 1}")
    assert shown({n: n for n in range(9)}) == "{0: 0, 1: 1, 2: 2, 3: 3, ...}"
    assert shown({}) == "{}"
