"""Somebody else's model family: a package that pip installs, found by its entry point."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support import reference
from tests.support.checkpoints import ROOT
from tests.support.child import in_child
from tests.support.engine import count_calls, engine, greedy
from tests.support.families import prompt
from tests.support.packages import pip_install
from tests.support.random_weights import SIZES, VOCABULARY, spread, state, write_tokenizer
from tests.support.reference import MARGIN, Answer, Rule

BLOCK, MASK = 8, VOCABULARY - 1


class Reference(reference.Reference):
    def __init__(self, path: Path) -> None:
        self.block, self.mask = BLOCK, MASK
        self.model, _ = reference.load(path, "Qwen2")


def random_checkpoint(path: Path, tied: bool) -> Path:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    spread(Qwen2ForCausalLM(Qwen2Config(**(SIZES | heads)))).save_pretrained(path)
    state(
        path,
        architectures=["BlockQwen2ForCausalLM"],
        canvas_length=BLOCK,
        mask_token_id=MASK,
    )
    write_tokenizer(path, 1)
    return path


PACKAGE = ROOT / "tests" / "packages" / "block_qwen2"
FILES = ("block_qwen2.py", "block_qwen2_model.py", "pyproject.toml")
# (tokens of the prompt, tokens to generate, threshold): shorter and longer than a block of 8,
# beginning and ending on its edges and inside of it.
SHAPES = (
    *((1, 5, 0.2), (3, 13, 0.5), (7, 8, 0.9), (8, 8, 0.2), (9, 1, 0.5), (16, 33, 0.2)),
    *((21, 24, 0.5), (40, 17, 0.9), (61, 40, 0.2), (96, 30, 0.5), (115, 21, 0.2), (150, 12, 0.5)),
)
PAGES_OF_32 = {"block_size": 32}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    # Chunks of a prompt of two blocks at most; what is cached is read again the second time.
    "chunks": {"max_num_batched_tokens": 20, "max_num_seqs": 2} | PAGES_OF_32,
    # So few pages that running requests take them from each other, one step ahead.
    "preempted": {"num_gpu_blocks_override": 10, "max_model_len": 256, "async_scheduling": True}
    | PAGES_OF_32,
}


def served(model: str, asked: list[Any]) -> Iterator[list[list[list[int]]]]:
    """Where the family is installed: the answers of each engine, and again out of the cache."""
    prompts = [given for given, *_ in asked]
    params = [
        greedy(count, ignore_eos=True, stop_token_ids=stop, diffusion_threshold=threshold)
        for _, count, threshold, stop in asked
    ]
    for name, options in ENGINES.items():
        # The checkpoint alone says how long its canvases are.
        with engine(Path(model), BLOCK, **(options | {"diffusion_config": None})) as running:
            assert type(running.runner.model).__module__ == "block_qwen2_model"
            assert type(running.runner.model_state.family).__module__ == "block_qwen2"
            preempted = count_calls(running.scheduler, "_preempt_request")
            twice = [running.generate(prompts, params) for _ in range(2)]
            assert bool(preempted) == (name == "preempted"), name
            running.assert_idle()
        yield [[tokens for tokens, _ in once] for once in twice]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PACKAGE, FILES, tmp_path_factory)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, id="head"), pytest.param(True, id="tied-head", marks=pytest.mark.long)],
)
def test_installed_family_equals_transformers(installed: Path, tmp_path: Path, tied: bool) -> None:
    """Token for token, however the requests are scheduled."""
    model = random_checkpoint(tmp_path, tied)
    reference = Reference(model)
    asked: list[Any] = [
        (prompt(n, length), count, threshold, [])
        for n, (length, count, threshold) in enumerate(SHAPES)
    ]

    def answer(given: list[int], count: int, threshold: float, stop: list[int]) -> Answer:
        return reference.generate(given, count, Rule(threshold=threshold), tuple(stop))

    # One of the long answers ends early, at its fifth token.
    asked[5] = (*asked[5][:3], [answer(*asked[5]).tokens[4]])
    wanted = [answer(*one) for one in asked]
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(asked) - 2, "too many near ties to compare"
    steps = [count for answer in wanted for count in answer.decided]
    assert max(steps) == BLOCK and min(steps) == 1 and len(set(steps)) >= 6, steps

    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    found = in_child(served, model, asked, env=os.environ | {"PYTHONPATH": path})
    for name, twice in zip(ENGINES, found, strict=True):
        for answers in twice:
            different = [n for n in robust if answers[n] != wanted[n].tokens]
            assert not different, (name, different)


def test_the_docs_show_this_package() -> None:
    shown = (ROOT / "docs" / "adding_a_family.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", shown, re.DOTALL)
    assert blocks == [(PACKAGE / name).read_text() for name in FILES]
