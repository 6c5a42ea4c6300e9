"""Prefix caching changes no token, because only committed pages are ever cached.

A conversation asks on with prompt and answer, so pages of answers are found again, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.drive import PAGE, TWO_BLOCKS, Driver, Family, assert_nothing_held
from tests.support.engine import Engine, count_calls

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FRESH, FOLLOWING = 120, 180  # requests, of which the latter ask on
SEATS = 30
Request = tuple[list[int], Any]
Answer = tuple[list[int], str]


def fresh_requests(family: Family) -> list[Request]:
    """Prompts that share beginnings, which end anywhere: in blocks, in pages, on their bounds."""
    draw = random.Random(11)
    stems = family.prompts((40, 64, 96, 150), seed=12)
    asked = []
    for n in range(FRESH):
        stem = draw.choice(stems)
        cut = draw.choice((draw.randrange(1, len(stem) + 1), len(stem) // PAGE * PAGE, PAGE))
        (own,) = family.prompts((draw.choice((0, 1, draw.randrange(2, 40))),), seed=1000 + n)
        # A third ends exactly with a page, so that its last canvas completes that page.
        prompt = stem[:cut] + own
        to_bound = -len(prompt) % PAGE or PAGE
        tokens = to_bound if draw.random() < 0.33 else draw.randrange(1, 40)
        asked.append((prompt, family.params(tokens, "quick", ignore_eos=True, seed=n)))
    return asked


def following_requests(
    family: Family, asked: list[Request], answers: list[Answer]
) -> list[Request]:
    """Prompt, answer (or some of it), and more."""
    draw = random.Random(13)
    following = []
    for n in range(FOLLOWING):
        (prompt, _), (answer, _) = draw.choice(list(zip(asked, answers, strict=True)))
        kept = answer[: draw.choice((len(answer), draw.randrange(len(answer))))]
        (own,) = family.prompts((draw.randrange(1, 20),), seed=2000 + n)
        params = family.params(draw.randrange(1, 24), "quick", ignore_eos=True, seed=n)
        following.append((prompt + kept + own, params))
    return following


def generate(running: Engine, asked: list[Request]) -> list[Answer]:
    return running.generate([p for p, _ in asked], [q for _, q in asked])


@pytest.fixture(scope="module")
def wanted(family: Family) -> tuple[list[Request], list[Request], list[Answer]]:
    """300 requests in two rounds, and what an engine without a cache answers."""
    with family.start(enable_prefix_caching=False, max_num_seqs=SEATS) as running:
        asked = fresh_requests(family)
        answers = generate(running, asked)
        following = following_requests(family, asked, answers)
        return asked, following, answers + generate(running, following)


@pytest.fixture(
    scope="module",
    params=["two-blocks", *(pytest.param(w, marks=pytest.mark.long) for w in ("sync", "async"))],
)
def running(
    request: pytest.FixtureRequest, family: Family, wanted: Any
) -> Iterator[Engine]:  # behind `wanted`: only one engine can live in a process
    options: dict[str, Any] = {"async_scheduling": request.param != "sync"}
    if request.param == "two-blocks":
        if family.name == "gemma":
            pytest.skip("its commits and steps have different masks")
        options = TWO_BLOCKS
    with family.start(max_num_seqs=SEATS, **options) as started:
        yield started


def test_answers_are_those_without_a_cache(family: Family, wanted: Any, running: Engine) -> None:
    asked, following, answers = wanted
    got = generate(running, asked)
    hits = count_calls(running.block_pool, "touch")
    got += generate(running, following)
    assert len(hits) > FOLLOWING // 2
    different = [n for n, one in enumerate(got) if one != answers[n]]
    assert not different, f"{len(different)} of {len(got)}"
    assert_nothing_held(running)


def cached_pages(running: Engine) -> int:
    """Pages with a hash, of the group that caches every page."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    hashes = [block.block_hash for block in running.block_pool.blocks if block.block_hash]
    groups = [get_group_id(one) for one in hashes]
    return max(map(groups.count, set(groups)), default=0)


def test_only_committed_pages_are_cached(family: Family, running: Engine) -> None:
    """After every step: no page that reaches into a canvas that has not been committed.

    The last canvas, which leaves without a commit, ends with a page here.
    """
    (prompt,) = family.prompts((2 * PAGE + 3,), seed=21)
    tokens = 3 * PAGE - 3
    running.scheduler.reset_prefix_cache()
    driver = Driver(running)
    driver.add("r", prompt, family.params(tokens, "quick", ignore_eos=True))
    committed = len(prompt)
    while running.llm.llm_engine.has_unfinished_requests():
        driver.step()
        if (canvas := driver.canvas("r")) is not None:
            committed = max(committed, canvas[1])
        assert cached_pages(running) <= committed // PAGE
    driver.finish()
    last_canvas = len(prompt) + tokens - 1
    last_canvas -= (last_canvas - (len(prompt) - family.tail(prompt))) % family.length
    assert cached_pages(running) == last_canvas // PAGE, "no more, and no less"
