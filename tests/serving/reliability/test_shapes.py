"""Lengths around the bounds of canvases, pages, budgets and contexts.

Beside `tests/serving/engines/test_limits.py` (LLaDA2: filled contexts, rounding) and
`tests/serving/engines/test_families.py` (odd checkpoints), with which this shares the references.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.drive import PAGE, Family, assert_nothing_held, gemma, llada2
from tests.support.engine import Engine, count_calls, greedy
from tests.support.reference import MARGIN, Rule
from tests.support.reference_gemma import COLD
from tests.support.reference_gemma import Reference as GemmaReference
from tests.support.reference_llada2 import Reference

pytestmark = pytest.mark.engine

END = 508
# L - 1, L, L + 1 and one more block; around a page.
LENGTHS = {
    "llada2": (1, 7, 8, 9, 15, 16, 17, PAGE - 1, PAGE, PAGE + 1, 41, 2 * PAGE + 1),
    "gemma": (1, PAGE - 1, PAGE, PAGE + 1, 41, 2 * PAGE, 2 * PAGE + 1, 81),
}


def chunks_of(running: Engine) -> list[int]:
    """Lengths of the prefill chunks that are scheduled from now on."""
    seen: list[int] = []
    schedule = running.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        canvases = output.scheduled_spec_decode_tokens
        scheduled = output.num_scheduled_tokens.items()
        # What has put something out commits a block that the budget holds no canvas beside.
        seen.extend(
            tokens
            for name, tokens in scheduled
            if name not in canvases and not running.scheduler.requests[name].num_output_tokens
        )
        return output

    running.scheduler.schedule = watched
    return seen


# Budget (of one canvas, of no multiple of it, of four): (a prompt, its chunks when it is alone).
ALONE = {8: (9, [8, 1]), 20: (PAGE + 1, [16, 17]), 32: (PAGE + 1, [32, 1])}


@pytest.mark.parametrize("budget", ALONE)
def test_llada2_prompts_and_budgets(budget: int) -> None:
    family = llada2()
    asked = family.prompts(LENGTHS["llada2"], seed=31)
    reference = Reference.load(family.path, 8, oracle.checkpoint("ckpt_b_b8").mask_token_id)
    wanted = [reference.generate(prompt, 11, Rule(threshold=0.5), (END,)) for prompt in asked]
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(asked) - 2
    params = greedy(11, diffusion_threshold=0.5)
    seats = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 16)}
    with family.start(**seats) as running:
        chunks = chunks_of(running)
        tokens, wanted_chunks = ALONE[budget]
        n = LENGTHS["llada2"].index(tokens)
        assert n in robust
        assert running.generate([asked[n]], [params])[0][0] == wanted[n].tokens
        assert chunks == wanted_chunks
        got = running.generate(asked, [params] * len(asked))
        assert max(chunks) <= budget
        for n in robust:
            assert got[n][0] == wanted[n].tokens, f"prompt of {len(asked[n])} tokens"
        assert_nothing_held(running)


@pytest.fixture(scope="module")
def little(gemma_path: Path) -> Iterator[tuple[Family, Engine]]:
    """A budget between one canvas and two; a context that is no multiple of the canvas."""
    family = gemma(gemma_path)
    limits = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "max_model_len": 430}
    with family.start(**limits) as running:
        yield family, running


def test_gemma_prompts_and_budget(little: tuple[Family, Engine]) -> None:
    family, running = little
    asked = family.prompts(LENGTHS["gemma"], seed=32)
    reference = GemmaReference(family.path, "symmetric")
    wanted = [
        reference.generate(prompt, seed=n, canvases=2, max_denoising_steps=3, **COLD)
        for n, prompt in enumerate(asked)
    ]
    options = {"ignore_eos": True, "diffusion_max_steps": 3}
    params = [greedy(2 * family.length, seed=n, **options) for n in range(len(asked))]
    chunks = chunks_of(running)
    try:
        n = LENGTHS["gemma"].index(41)
        assert running.generate([asked[n]], [params[n]])[0][0] == wanted[n]
        assert chunks == [40, 1], "a remainder of one token, which is no canvas"
        assert [tokens for tokens, _ in running.generate(asked, params)] == wanted
    finally:
        del running.scheduler.schedule
    assert max(chunks) <= 40
    assert_nothing_held(running)


@pytest.mark.parametrize("left", [1, 10, 31, 32, 33])
def test_gemma_prompt_leaves_less_than_a_canvas(left: int, little: tuple[Family, Engine]) -> None:
    """The canvas is as narrow as the context is then, and gives what a narrow canvas gives."""
    family, running = little
    (prompt,) = family.prompts((430 - left,), seed=34)
    updates = count_calls(running.runner.sampler, "update")
    params = family.params(1000, ignore_eos=True, diffusion_max_steps=2)
    tokens, reason = running.generate([prompt], [params])[0]
    del running.runner.sampler.update
    assert (len(tokens), reason) == (left, "length")
    assert len(updates) <= 2 + 3, "a commit and another canvas at most"
    if left < family.length:
        narrow = family.params(
            left, ignore_eos=True, diffusion_max_steps=2, diffusion_canvas_length=left
        )
        assert running.generate([prompt], [narrow])[0] == (tokens, "length")
    assert_nothing_held(running)
