"""Every argument of vLLM's engine is refused, served, or of no concern: none was overlooked."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import vllm
from packaging.version import Version

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.engine import engine, greedy
from tests.support.engine_arguments import LATER, NO_CONCERN, REFUSED, SERVED, TRIED
from vllm_dllm.startup.checks import REFUSED as BY_CHECKS

TABLES = [REFUSED, SERVED, NO_CONCERN, *TRIED.values()]
PROMPTS = [[(7 * i + n) % 200 for i in range(9 + 35 * n)] for n in range(4)]


def known() -> set[str]:
    """The arguments that the installed release should have."""
    return {
        name
        for table in TABLES
        for name in table
        if Version(vllm.__version__) >= Version(LATER.get(name, "0"))
    }


def test_every_argument_is_in_one_table() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    has = {field.name for field in fields(AsyncEngineArgs)}
    assert has - known() == set(), "say in tests/support/engine_arguments.py what becomes of these"
    assert known() - has == set(), "the release has no such arguments"
    twice = [name for name, count in Counter(n for t in TABLES for n in t).items() if count > 1]
    assert twice == []


@pytest.mark.engine
def test_what_is_refused_has_a_place_in_the_configuration() -> None:
    """A path that a release has renamed would refuse nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = EngineArgs(model=str(TINY_GEMMA), max_model_len=512).create_engine_config()
    for path in BY_CHECKS:
        value: Any = config
        for name in path.split("."):
            assert hasattr(value, name), path
            value = getattr(value, name)
        # This package sets its scheduler after the check.
        assert path == "scheduler_config.scheduler_cls" or not value, path


def answers(tried: dict[str, Any], gemma: bool) -> list[tuple[list[int], str]]:
    model = TINY_GEMMA if gemma else TINY_LLADA2
    if gemma and not tried:
        tried = TEXT_ONLY_OPTIONS
    asked = [
        greedy(40),
        greedy(24, ignore_eos=True),
        greedy(10, detokenize=False),
        greedy(33, logprobs=2),
    ]
    with engine(model, 32, **tried) as running:
        found = running.generate(PROMPTS, asked)
        assert running.generate(PROMPTS, asked) == found, "from the prefix cache"
        return found


@pytest.fixture(scope="module")
def plain() -> dict[bool, list[tuple[list[int], str]]]:
    """The answers of engines with none of the arguments, by whether it is DiffusionGemma."""
    return {gemma: answers({}, gemma) for gemma in (False, True)}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("group", TRIED)
def test_an_engine_answers_as_without(
    group: str, plain: dict[bool, list[tuple[list[int], str]]]
) -> None:
    gemma = group in ("pictures", "text")
    assert answers(TRIED[group], gemma) == plain[gemma]
