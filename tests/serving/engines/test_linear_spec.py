"""LinearSpec against greedy decoding of the same weights with vLLM's own Ministral 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_nemotron import ENGINES
from tests.support.engine import answers_of_child, count_calls, engine, greedy
from tests.support.nemotron_requests import prompt, verifying
from tests.support.reference_nemotron import (
    Reference,
    autoregressive_checkpoint,
    random_checkpoint,
)
from tests.support.sdar_requests import MARGIN

# The context ends within a canvas, and within an answer.
SHORT: dict[str, Any] = {"max_model_len": 107}
QUICK = ("plain", "preempted, a step ahead")
EVERY = ENGINES | {
    "the context ends": SHORT,
    "the context ends, a step ahead": SHORT | {"async_scheduling": True},
}

SOME = (
    *("sync, a step ahead", "chunks, a step ahead", "preempted, a step ahead"),
    "the context ends, a step ahead",
)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "likely", "count", "names"),
    [
        pytest.param(8, 5, 24, QUICK, id="8-quick"),
        *(
            pytest.param(block, likely, 200, names, id=f"{block}-{likely}", marks=pytest.mark.long)
            for block, likely, names in (
                (8, 5, tuple(EVERY)),
                (5, 3, SOME),
                (32, 2, SOME),
                (8, 300, QUICK),
            )
        ),
    ],
)
def test_the_answer_is_that_of_greedy_decoding(
    tmp_path: Path, block: int, likely: int, count: int, names: tuple[str, ...]
) -> None:
    """Token for token, alone and together; where drafts are often right, in fewer passes."""
    model = random_checkpoint(tmp_path / "model", block, likely)
    backbone = autoregressive_checkpoint(tmp_path / "backbone", of=model)
    asked = verifying(count)
    options = [EVERY[name] for name in names]
    wanted, *found = answers_of_child("linear_spec_child", model, backbone, asked, options)
    reference = Reference(model)
    margins = [
        reference.greedy_margin(one["prompt"], tokens)
        for one, tokens in zip(asked, wanted, strict=True)
    ]
    assert min(margins) > -MARGIN, "vLLM's own answer is not the greedy one"
    robust = [n for n, margin in enumerate(margins) if margin > MARGIN]
    assert len(robust) >= 0.98 * count, "too many near ties to compare"
    for name, served in zip(names, found, strict=True):
        assert (served["preemptions"] > 0) == ("preempted" in name), name
        alone = {int(n): tokens for n, tokens in served["alone"].items()}
        assert len(alone) == count / 4
        for answers in (*map(dict, map(enumerate, served["answers"])), alone):
            different = [
                n for n in robust if n in answers and answers[n] != room(name, asked[n], wanted[n])
            ]
            assert not different, (name, different)
        print(
            f"block {block}, {likely} likely ids, {name}: {len(robust)} of {count} compared, "
            f"{served['passes per token']:.2f} passes per token"
        )


@pytest.mark.engine
@pytest.mark.slow
def test_linear_spec_keeps_as_much_of_a_draft_as_the_loop(tmp_path: Path) -> None:
    """As many passes, and at least one draft of which several tokens were right."""
    model = random_checkpoint(tmp_path, 8, likely=2)
    reference = Reference(model)
    prompts = [prompt(n, 2 + 3 * n) for n in range(12)]
    wanted = [reference.linear_spec(one, 40, 8) for one in prompts]
    with engine(model, 8, diffusion_config=None) as alone:
        passes = count_calls(alone.scheduler, "make_spec_decoding_stats")
        params = greedy(40, ignore_eos=True, diffusion_algorithm="LinearSpec")
        for one, (tokens, rounds) in zip(prompts, wanted, strict=True):
            passes.clear()
            assert alone.generate([one], [params])[0][0] == tokens
            assert len(passes) == 2 * rounds
    assert min(rounds for _, rounds in wanted) < 30


def room(name: str, asked: dict[str, Any], wanted: list[int]) -> list[int]:
    """The tokens that fit into the engine's context."""
    if not name.startswith("the context ends"):
        return wanted
    return wanted[: SHORT["max_model_len"] - len(asked["prompt"])]
