"""Options that change rows of logits, in slots that requests pass on to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.drive import Driver, Family, gemma, llada2
from tests.support.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WARM = {"temperature": 0.9, "seed": 3}
OPTIONS: list[dict[str, Any]] = [
    {"logit_bias": {30: 4.0, 31: -9.0}},
    WARM | {"top_k": 5},
    {},
    {"allowed_token_ids": [40, 41, 42, 43]},
    WARM | {"top_p": 0.5, "min_p": 0.02},
    {"min_tokens": 15, "stop_token_ids": list(range(60, 110))},
    WARM,
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    WARM | {"logit_bias": {50: 3.0}, "top_k": 9, "repetition_penalty": 1.2, "min_tokens": 9},
]


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if request.param == "llada2":
        return llada2()
    return gemma(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def running(family: Family) -> Iterator[Engine]:
    """Three slots; the next step is launched before the last one's results are read."""
    with family.start(async_scheduling=True, max_num_seqs=3) as started:
        yield started


def requests(family: Family) -> tuple[list[list[int]], list[Any]]:
    """Of different lengths, so that slots change hands at different times."""
    prompts = family.prompts([11 + 5 * n for n in range(len(OPTIONS))], seed=6)
    params = []
    for n, options in enumerate(OPTIONS):
        common = {"max_tokens": 20 + 7 * (n % 4), "temperature": 0.0, "seed": 8}
        pace = family.quick if n % 3 else family.slow
        params.append(SamplingParams(**(common | options), extra_args=dict(pace)))
    return prompts, params


def test_the_next_request_in_a_slot_is_as_alone(running: Engine, family: Family) -> None:
    """While a step of the last request in the slot is in flight, twice over."""
    prompts, params = requests(family)
    alone = [running.generate([p], [one])[0] for p, one in zip(prompts, params, strict=True)]
    assert running.generate(prompts, params) == alone
    assert running.generate(prompts[::-1], params[::-1]) == alone[::-1]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(alone)


def test_options_come_back_after_preemption(running: Engine, family: Family) -> None:
    """Requests are preempted in a batch, and come back to other slots."""
    prompts, params = requests(family)
    expected = [tokens for tokens, _ in running.generate(prompts, params)]
    driver = Driver(running)
    for n, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        driver.add(f"r{n}", prompt, one)
    for _ in range(6):
        for _ in range(5):
            driver.step()
        assert running.core.reset_prefix_cache(reset_running_requests=True)
    tokens = driver.finish()
    assert [tokens[f"r{n}"] for n in range(len(prompts))] == expected
    running.assert_idle()
