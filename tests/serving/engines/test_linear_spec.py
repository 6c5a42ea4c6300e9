"""LinearSpec against greedy decoding of the same weights with vLLM's own Ministral 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_nemotron import ENGINES
from tests.support.engine import answers_of_child
from tests.support.nemotron_requests import verifying
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
    for name, engine in zip(names, found, strict=True):
        assert (engine["preemptions"] > 0) == ("preempted" in name), name
        alone = {int(n): tokens for n, tokens in engine["alone"].items()}
        assert len(alone) == count / 4
        for answers in (*map(dict, map(enumerate, engine["answers"])), alone):
            different = [
                n for n in robust if n in answers and answers[n] != room(name, asked[n], wanted[n])
            ]
            assert not different, (name, different)
        print(
            f"block {block}, {likely} likely ids, {name}: {len(robust)} of {count} compared, "
            f"{engine['passes per token']:.2f} passes per token"
        )


def room(name: str, asked: dict[str, Any], wanted: list[int]) -> list[int]:
    """The tokens that fit into the engine's context."""
    if not name.startswith("the context ends"):
        return wanted
    return wanted[: SHORT["max_model_len"] - len(asked["prompt"])]
