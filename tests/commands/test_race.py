"""The race of ``vllm-dllm tune``: its figures, who leaves it, and that the right one wins."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.support.statistics import wilson_interval
from vllm_dllm.commands import tune
from vllm_dllm.commands.tune import (
    Part,
    Setting,
    against,
    as_yaml,
    interval,
    part_ends,
    settings_of,
    still_racing,
    winner,
)
from vllm_dllm.decoding import EditTokens
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

SERVED = Served("mask", "LowConfidence", DllmSettings(), length=32)
CHOICE = SERVED.choose()
PROBLEMS = 200


def done(scores: list[float], tokens_per_pass: float, name: str = "") -> Setting:
    part = Part(scores, 1000, round(1000 / tokens_per_pass), 1.0)
    return Setting(name, {"algorithm": name}, CHOICE, [part])


@pytest.mark.parametrize("right", [20, 150, 199])
def test_the_interval_of_a_rate_is_close_to_wilson_s(right: int) -> None:
    scores = [1.0] * right + [0.0] * (200 - right)
    assert interval(scores, 0, 0, 1, 1) == pytest.approx(wilson_interval(right, 200), abs=0.005)


def test_the_interval_of_a_difference() -> None:
    """Bonett's and Price's, computed by hand: b + 1 = 5 and c + 1 = 15 of n + 2 = 102."""
    ours, theirs = [1.0] * 4 + [0.0] * 14 + [1.0] * 82, [0.0] * 4 + [1.0] * 96
    low, high = (5 - 15) / 102, 1.96 * ((20 / 102 - (10 / 102) ** 2) / 102) ** 0.5
    found = against(done(ours, 1.0), done(theirs, 1.0))
    assert found == pytest.approx((-0.1, low - high, low + high))


def test_the_winner_is_fast_and_good_enough() -> None:
    """One point of 100 may be missing, and not two; a better one of equal speed goes first."""
    careful = done([1.0] * 100, 1.0, "careful")
    one = done([0.0] + [1.0] * 99, 3.0, "one wrong")
    two = done([0.0] * 2 + [1.0] * 98, 4.0, "two wrong")
    settings = [careful, two, one]
    assert winner(settings, 0.01) is one
    assert winner(settings, 0.02) is two
    assert winner(settings, 0.0) is careful
    assert winner([*settings, done([1.0] * 100, 3.0, "right")], 0.01).name == "right"


class Simulated:
    """Settings whose scores and speeds are known: the faster, the worse, from a point on."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.truth: dict[str, tuple[list[float], float]] = {}
        for n in range(30):
            speed, wrong = 1.0 + 0.1 * n, max(0.0, rng.gauss(0.02 * (n - 10), 0.02))
            scores = [float(rng.random() >= wrong) for _ in range(PROBLEMS)]
            self.truth[str(n)] = scores, speed
        self.truth["0"] = [1.0] * PROBLEMS, 1.0

    def settings(self) -> list[Setting]:
        return [Setting(name, {"algorithm": name}, CHOICE) for name in self.truth]

    def answer(self, setting: Setting, end: int) -> None:
        scores, speed = self.truth[setting.name]
        begin = len(setting.scores)
        passes = round(10_000 * (end - begin) / speed)
        setting.parts.append(Part(scores[begin:end], 10_000 * (end - begin), passes, 1.0))


@pytest.mark.parametrize("seed", range(20))
def test_a_race_finds_what_an_exhaustive_sweep_finds(seed: int) -> None:
    simulated, ends = Simulated(seed), part_ends(PROBLEMS)
    every, raced = simulated.settings(), simulated.settings()
    for each in every:
        for end in ends:
            simulated.answer(each, end)
    while racing := still_racing(raced, len(ends), 0.01):
        simulated.answer(racing[0], ends[len(racing[0].parts)])
    best = winner(raced, 0.01)
    assert best.name == winner(every, 0.01).name
    assert sum(len(each.scores) for each in raced) < 0.5 * PROBLEMS * len(raced)


def test_the_settings_of_a_masked_model() -> None:
    settings = settings_of(SERVED)
    names = [each.name for each in settings]
    assert names[:2] == ["LowConfidence threshold=1", "default"]
    # The server's own setting is not tried twice.
    assert "LowConfidence threshold=0.9" in names and "LowConfidence threshold=0.95" not in names
    assert {"FixedSteps steps=8", "EntropyBound entropy_bound=0.4", "JointThreshold-Q"} < {*names}
    assert not any(name.startswith(("LinearSpec", "JointThresholdInDel")) for name in names)
    assert len(set(names)) == len(names)
    assert {each.choice.algorithm.name for each in settings_of(SERVED, ["Credit"])} == {
        "Credit",
        "LowConfidence",
    }
    with pytest.raises(SettingsError, match="did you mean 'Credit'"):
        settings_of(SERVED, ["Credits"])


def test_the_winner_as_a_configuration_file() -> None:
    options = {"algorithm": "LowConfidence", "threshold": 0.7}
    best = Setting("", options, SERVED.choose(options))
    given = {"execution": "sync", "threshold": 0.3, "algorithm": "Credit"}
    assert yaml.safe_load(as_yaml(best, given)) == {
        "additional-config": {
            "dllm": {"execution": "sync", "algorithm": "LowConfidence", "threshold": 0.7}
        }
    }


HEADER = {"version": "1", "data": "a"}


def test_measurements_of_another_sweep_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "measurements.jsonl"
    tune.take_up(log, HEADER, [])
    with pytest.raises(ValueError, match="is of data 'a', not 'b'; choose another --output"):
        tune.take_up(log, {**HEADER, "data": "b"}, [])
    with pytest.raises(ValueError, match="is of max_tokens None, not '64'"):
        tune.take_up(log, {**HEADER, "max_tokens": "64"}, [])


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("", "0 of 0 prompts have an answer"),
        ('{"prompt": "a"}\n\n{"prompt"', "3: Expecting ':' delimiter"),
        ('{"prompt": "a"}\nnull', "2: None is not an object with a prompt"),
        ('{"prompt": 5}', "1: messages need .* a prompt a text: .*5"),
        ('{"messages": []}', "1: messages need a role"),
        ('{"prompt": "a", "answer": null}', "1: an answer may not be null"),
        ("[" * 100_000, "1: maximum recursion depth"),
        ('{"prompt": "a", "output": "b"}', "1: the name 'output' is for --score-command"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}', "1 of 2 prompts have an answer"),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, lines: str, complaint: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=complaint):
        tune.read_rows(path)


def test_lines_end_only_in_line_feeds(tmp_path: Path) -> None:
    """Blank lines and a byte order mark are no prompts; other ends of lines are part of one.

    Prompts are shuffled, always in the same way.
    """
    path = tmp_path / "data.jsonl"
    texts = [f"a{end}b" for end in "\u2028\u2029\x85\x0b\x0c\x1c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=text[1] < " ") for text in texts]
    path.write_bytes(("\ufeff" + "\r\n".join([*lines, "", " "]) + "\n").encode())
    found = [row["prompt"] for row in tune.read_rows(path)]
    assert found != texts and sorted(found) == sorted(texts)
    assert [row["prompt"] for row in tune.read_rows(path)] == found
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"data\.jsonl:2: .*utf-8"):
        tune.read_rows(path)


def test_a_model_that_edits_races_with_its_own_rules() -> None:
    """Catches a careful setting that wrote the ids of edits into texts."""
    served = replace(
        SERVED, own_algorithm="JointThresholdInDel", edit_tokens=EditTokens(299, 290, 291)
    )
    careful, *others = settings_of(served)
    assert careful.options == {"algorithm": "JointThresholdInDel"}
    assert others and all(each.choice.algorithm.moves for each in others)
    with pytest.raises(SettingsError, match="LowConfidence would write the ids of edits"):
        settings_of(served, ["LowConfidence"])
    other_rule = replace(served, settings=DllmSettings(algorithm="LowConfidence"))
    assert all(each.choice.algorithm.moves for each in settings_of(other_rule))
    assert settings_of(SERVED)[0].options == {"algorithm": "LowConfidence", "threshold": 1.0}


def scored(code: str) -> list[float]:
    rows = [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"}]
    return tune.scores_of([sys.executable, "-c", code], rows, ["x", "z"])


def test_a_command_scores() -> None:
    code = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(0.5 * (row["output"] == row["answer"]))
"""
    assert scored(code) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("print(1)", "and not a number from 0 to 1 for each"),
        ("print('nan', 1)", "and not a number from 0 to 1 for each"),
        ("import sys; sys.exit('no scores')", "--score-command ended with 1: no scores"),
    ],
)
def test_scores_that_cannot_be_used(code: str, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        scored(code)
