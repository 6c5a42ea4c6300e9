"""The race of ``vllm-dllm tune``: its figures, who leaves it, and that the right one wins."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.statistics import wilson_interval
from vllm_dllm.commands import tune
from vllm_dllm.commands.prompt_file import conversation
from vllm_dllm.commands.sweep import (
    Part,
    Setting,
    against,
    hopeless,
    interval,
    pareto_front,
    part_ends,
    settings_of,
    still_racing,
    winner,
)
from vllm_dllm.commands.sweep_report import as_yaml, draw, print_table
from vllm_dllm.decoding import EditTokens
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

SERVED = Served("mask", "LowConfidence", DllmSettings(), length=32)
CHOICE = SERVED.choose()
PROBLEMS = 200


def done(scores: list[float], tokens_per_pass: float, name: str = "") -> Setting:
    """A setting that has answered so many problems in one part."""
    part = Part(scores, 1000, round(1000 / tokens_per_pass), 1.0)
    return Setting(name, {"algorithm": name}, CHOICE, [part])


def test_parts_grow_to_the_whole() -> None:
    assert part_ends(200) == [25, 50, 100, 200]
    assert part_ends(3) == [1, 3]
    assert part_ends(1) == [1]


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


def test_intervals_cover_the_truth() -> None:
    """Of a difference of two points between settings that differ in 7 of 100 answers."""
    rng, covered = random.Random(0), 0
    for _ in range(1000):
        theirs = [float(rng.random() < 0.9) for _ in range(200)]
        ours = [score if rng.random() < 0.8 else float(rng.random() < 0.8) for score in theirs]
        _, low, high = against(done(ours, 1.0), done(theirs, 1.0))
        covered += low <= 0.2 * (0.8 - 0.9) <= high
    assert 0.95 < covered / 1000 < 0.99


def test_hopeless_needs_evidence() -> None:
    careful = done([1.0] * 25, 1.0)
    assert not hopeless(done([1.0] * 25, 2.0), careful, 0.01)
    assert not hopeless(done([0.0] + [1.0] * 24, 2.0), careful, 0.01)
    assert hopeless(done([0.0] * 10 + [1.0] * 15, 2.0), careful, 0.01)


def test_the_pareto_front() -> None:
    points = [(1.0, 0.9), (2.0, 0.9), (2.0, 0.8), (4.0, 0.5), (3.0, 0.4), (1.0, 1.0)]
    settings = [done([score], speed, str(n)) for n, (speed, score) in enumerate(points)]
    assert [each.name for each in pareto_front(settings)] == ["1", "3", "5"]
    assert [each.name for each in pareto_front(settings, lambda each: 1.0)] == ["5"]


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
    """And measures less than half of it."""
    simulated, ends = Simulated(seed), part_ends(PROBLEMS)
    every, raced = simulated.settings(), simulated.settings()
    for each in every:
        for end in ends:
            simulated.answer(each, end)
    while racing := still_racing(raced, len(ends), 0.01):
        simulated.answer(racing[0], ends[len(racing[0].parts)])
    best = winner(raced, 0.01)
    assert best.name == winner(every, 0.01).name
    assert best.name in {each.name for each in pareto_front(every)}
    assert sum(len(each.scores) for each in raced) < 0.5 * PROBLEMS * len(raced)


def test_a_refused_setting_is_left_out() -> None:
    careful, refused = (Setting(name, {}, CHOICE) for name in ("careful", "refused"))
    assert still_racing([careful, refused], 1, 0.01) == [careful, refused]
    careful.parts.append(Part([1.0], 1, 1, 1.0))
    assert still_racing([careful, refused], 1, 0.01) == [refused]
    refused.refusal = "greedy only"
    assert still_racing([careful, refused], 1, 0.01) == []
    assert winner([careful, refused], 0.01) is careful


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


def test_the_settings_of_a_model_of_noise() -> None:
    """The first is the server's own, which is not tried twice."""
    served = Served("uniform", "EntropyBound", DllmSettings(), {"max_denoising_steps": 48})
    names = [each.name for each in settings_of(served)]
    assert names[0] == "default"
    assert "EntropyBound entropy_bound=0.2 confidence_threshold=0.05" in names
    assert "EntropyBound entropy_bound=0.1 confidence_threshold=0.005" not in names


def test_the_winner_as_a_configuration_file() -> None:
    """It has all of the algorithm's settings, and what the engine was given beside them."""
    options = {"algorithm": "LowConfidence", "threshold": 0.7}
    best = Setting("", options, SERVED.choose(options))
    given = {"execution": "sync", "threshold": 0.3, "algorithm": "Credit"}
    assert yaml.safe_load(as_yaml(best, given)) == {
        "additional-config": {
            "dllm": {"execution": "sync", "algorithm": "LowConfidence", "threshold": 0.7}
        }
    }


def test_the_table_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        done([1.0] * 8, 1.0, "slowest"),
        done([1.0] * 8, 2.5, "fast"),
        Setting("odd", {}, CHOICE, refusal="greedy only"),
    ]
    print_table(settings, settings[1], 0.01)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines] == ["setting", "fast", "slowest", "odd"]
    assert lines[1].split()[-3:] == ["2.50", "1000", "winner"]
    assert lines[2].endswith("careful") and "refused: greedy only" in lines[3]
    draw(settings, settings[1], tmp_path / "pareto.svg")
    drawn = (tmp_path / "pareto.svg").read_text()
    # Both are on the front of tokens per second, which are equal.
    assert [drawn.count(f">{name}<") for name in ("fast", "slowest", "odd")] == [2, 1, 0]


HEADER = {"version": "1", "data": "a"}


def measured(log: Path, *settings: Setting) -> None:
    tune.take_up(log, HEADER, [])
    with log.open("a") as file:
        for each in settings:
            parts = [vars(part) for part in each.parts]
            line = {"setting": each.options, "refusal": each.refusal, "parts": parts}
            file.write(json.dumps(line) + "\n")


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    """Without the line in which it was cut off, and with lines of settings that no longer run."""
    log = tmp_path / "measurements.jsonl"
    measured(log, done([1.0], 2.0, "a"), done([0.5], 3.0, "gone"), done([1.0], 2.0, "b"))
    whole = log.read_text()
    log.write_text(whole[:-9])
    settings = [Setting(name, {"algorithm": name}, CHOICE) for name in "ab"]
    tune.take_up(log, HEADER, settings)
    assert [each.scores for each in settings] == [[1.0], []]
    assert log.read_text() == "".join(whole.splitlines(keepends=True)[:-1])


def test_measurements_of_another_sweep_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "measurements.jsonl"
    measured(log)
    with pytest.raises(ValueError, match="is of data 'a', not 'b'; choose another --output"):
        tune.take_up(log, {**HEADER, "data": "b"}, [])
    with pytest.raises(ValueError, match="is of max_tokens None, not '64'"):
        tune.take_up(log, {**HEADER, "max_tokens": "64"}, [])


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("", "0 of 0 prompts have an answer"),
        ("[]", r"1: \[\] is not an object with a prompt or with messages"),
        ('{"prompt": "a"}\n\n{"prompt"', "3: Expecting ':' delimiter"),
        ('{"prompt": "a", "messages": []}', "1: .* is not an object with a prompt"),
        ('{"prompt": "a"}\nnull', "2: None is not an object with a prompt"),
        ('{"prompt": 5}', "1: messages need .* a prompt a text: .*5"),
        ('{"prompt": null}', "1: messages need .* a prompt a text: .*None"),
        ('{"messages": []}', "1: messages need a role"),
        ('{"messages": null}', "1: messages need a role"),
        ('{"messages": ["a"]}', "1: messages need a role"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "1: messages need a role",
        ),
        ('{"messages": [{"content": "a"}]}', "1: messages need a role"),
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
    """Blank lines and a byte order mark are no prompts; other ends of lines are part of one."""
    path = tmp_path / "data.jsonl"
    texts = [f"a{end}b" for end in "\u2028\u2029\x85\x0b\x0c\x1c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=text[1] < " ") for text in texts]
    path.write_bytes(("\ufeff" + "\r\n".join([*lines, "", " "]) + "\n").encode())
    assert sorted(row["prompt"] for row in tune.read_rows(path)) == sorted(texts)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"data\.jsonl:2: .*utf-8"):
        tune.read_rows(path)


def test_messages_of_every_kind_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    path.write_text(json.dumps({"messages": said}))
    [row] = tune.read_rows(path)
    assert conversation(row) == said
    assert conversation({"prompt": ""}) == [{"role": "user", "content": ""}]


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


def test_data_is_shuffled_always_in_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": str(n)} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tune.read_rows(path)
    assert found != rows and sorted(found, key=str) == sorted(rows, key=str)
    assert tune.read_rows(path) == found


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


@pytest.mark.parametrize("code", ["print(1)", "print(1, 2)", "print('a', 'b')", "print('nan', 1)"])
def test_scores_that_cannot_be_used(code: str) -> None:
    with pytest.raises(RuntimeError, match="and not a number from 0 to 1 for each"):
        scored(code)


def test_a_command_that_fails() -> None:
    with pytest.raises(RuntimeError, match="--score-command ended with 1: no scores today"):
        scored("import sys; sys.exit('no scores today')")


def test_agreement() -> None:
    """An inserted token does not make everything after it differ."""
    assert tune.agreement([1, 2, 3], [1, 2, 3]) == 1.0
    assert tune.agreement([], []) == 1.0
    assert tune.agreement([9, 1, 2, 3], [1, 2, 3]) == pytest.approx(6 / 7)
    assert tune.agreement([1], [2]) == 0.0


def test_measuring_agreement_with_the_careful_setting() -> None:
    """Its own answers are kept; later parts are compared with the right ones."""
    rows = [{"prompt": str(n)} for n in range(4)]
    bench: Any = object.__new__(tune.Bench)
    bench.rows, bench.command = rows, []
    bench.llm = SimpleNamespace(reset_prefix_cache=lambda: None)
    bench.passes = iter(range(100)).__next__
    ids = [[1], [2], [3], [4]]
    bench.answer = lambda setting, begin, end: [
        SimpleNamespace(token_ids=each, text="") for each in ids[begin:end]
    ]
    careful, other = (Setting(name, {}, CHOICE) for name in ("careful", "other"))
    for setting in (careful, other):
        for end in (2, 4):
            setting.parts.append(bench.measure(setting, careful, end))
        ids[3] = [9]
    assert careful.scores == [1.0] * 4 and other.scores == [1.0, 1.0, 1.0, 0.0]
    assert careful.parts[1].answers == [[3], [4]] and other.parts[1].answers is None
