"""Special tokens that users write are text; the mask token is never an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import oracle
from tests.support.drive import assert_nothing_held, llada2
from tests.support.engine import Engine, greedy
from tests.support.reference import MARGIN, Rule
from tests.support.reference_llada2 import Reference
from vllm_dllm.decoding.registry import algorithm_names

pytestmark = pytest.mark.engine

MASK, END = 511, 508  # of the golden checkpoint
L = 8
RULE = Rule(threshold=0.5)
# Where the mask token stands in a prompt, and how long that is.
PLACES: dict[str, tuple[int, tuple[int, ...]]] = {
    "first-of-two": (2, (0,)),
    "whole-tail": (L + 3, (8, 9, 10)),
    "last-of-the-tail": (2 * L + 5, (20,)),
    "first-of-the-tail": (2 * L + 5, (16,)),
    "a-whole-block": (2 * L, tuple(range(L, 2 * L))),
    "everywhere": (3 * L - 1, tuple(range(3 * L - 1))),
    "around-a-page": (36, (30, 31, 32, 33)),
    "inside": (L + 1, (3,)),
}


class Biased(Reference):
    """The reference with something added to the mask token's logit, wherever it is read."""

    bias = 0.0

    def logits(self, ids: list[int], start: int | None = None) -> torch.Tensor:
        values = super().logits(ids)
        values[:, self.mask] += self.bias
        return values


@pytest.fixture(scope="module")
def masked() -> Iterator[Engine]:
    with llada2().start() as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Biased:
    return Biased.load(oracle.checkpoint("ckpt_b_b8").path, L, MASK)


def prompt_with(place: str, token: int) -> list[int]:
    length, positions = PLACES[place]
    (prompt,) = llada2().prompts((length,), seed=length)
    return [token if n in positions else t for n, t in enumerate(prompt)]


def wanted(reference: Reference, prompt: list[int], tokens: int) -> list[int]:
    answer = reference.generate(prompt, tokens, RULE, (END,))
    assert answer.margin > MARGIN, "a near tie: choose another prompt"
    return answer.tokens


@pytest.mark.parametrize("place", PLACES)
def test_a_mask_in_the_prompt_is_the_users(place: str, masked: Engine, reference: Biased) -> None:
    """The reference tracks positions, not ids. As ids, and as text through the tokenizer."""
    prompt = prompt_with(place, MASK)
    output = wanted(reference, prompt, 12)
    params = greedy(12, diffusion_threshold=0.5)
    assert masked.generate([prompt], [params])[0][0] == output
    text = " ".join("<|mask|>" if t == MASK else f"t{t}" for t in prompt)
    (answer,) = masked.llm.generate([text], [params], use_tqdm=False)
    assert answer.prompt_token_ids == prompt
    assert list(answer.outputs[0].token_ids) == output


@pytest.mark.parametrize("place", ["whole-tail", "a-whole-block", "everywhere"])
def test_an_end_in_the_prompt_ends_nothing(place: str, masked: Engine, reference: Biased) -> None:
    """Nor does a stop token that the user wrote."""
    prompt = prompt_with(place, END)
    params = greedy(12, diffusion_threshold=0.5, stop_token_ids=[prompt[0]])
    answer = reference.generate(prompt, 12, RULE, (END, prompt[0]))
    assert answer.margin > MARGIN
    assert masked.generate([prompt], [params])[0][0] == answer.tokens


@pytest.mark.parametrize("way", ["logit_bias", "head"])
def test_a_mask_that_the_model_prefers(way: str, masked: Engine, reference: Biased) -> None:
    """It costs probability, as the reference has it, and the next best token is taken."""
    (prompt,) = llada2().prompts((21,), seed=77)
    with mock.patch.object(reference, "bias", 14.0):
        logits = reference.logits(prompt + [MASK] * 3)[-3:]
        assert (logits.argmax(-1) == MASK).all(), "it would be chosen"
        output = wanted(reference, prompt, 19)
    params = greedy(19, diffusion_threshold=0.5)
    if way == "logit_bias":
        params.logit_bias = {MASK: 14.0}
        got = masked.generate([prompt], [params])
    else:
        got = with_head(masked, 14.0, [prompt], [params])
    assert got[0][0] == output
    assert MASK not in output


def with_head(running: Engine, bias: float, prompts: list[list[int]], params: list[Any]) -> Any:
    statistics = running.runner.sampler.readout
    head = statistics.head

    def biased(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        logits[:, MASK] += bias
        return logits

    with mock.patch.object(statistics, "head", biased):
        return running.generate(prompts, params)


@pytest.mark.parametrize("bias", [20.0, 1e5])
def test_no_algorithm_puts_out_a_mask(bias: float, masked: Engine) -> None:
    """However sure the model is of it, greedy and sampled, and every canvas comes to an end."""
    prompts = llada2().prompts((5, 19), seed=5)
    prompts.append(prompt_with("whole-tail", MASK))
    names = algorithm_names("mask", of_every_model=True)
    asked = [(p, name) for p in prompts for name in names]
    params = []
    for n, (_, name) in enumerate(asked):
        one = greedy(20, ignore_eos=True, diffusion_algorithm=name, seed=n)
        if n % 2 and not name.startswith("Credit"):
            one.temperature = 1.0
        params.append(one)
    for tokens, reason in with_head(masked, bias, [p for p, _ in asked], params):
        assert (len(tokens), reason) == (20, "length")
        assert MASK not in tokens
    assert_nothing_held(masked)
