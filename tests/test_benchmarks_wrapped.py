"""The benchmark of constraints on the form of answers: right answers are allowed, and counted."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from benchmarks.accuracy_tables import constrained_over_free
from benchmarks.wrapped_tasks import plain, read, wrapped
from examples.tiny.tasks import TASKS, Problem, as_json, held_out_set

PROBLEMS = held_out_set(20)


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_satisfy_both_constraints(task: str) -> None:
    mine = [problem for problem in PROBLEMS if problem.task == task]
    schema = wrapped(task, mine)["json"]
    for problem in mine:
        (kind, value), *others = plain(task, mine).items()
        assert not others
        if kind == "json":
            jsonschema.validate(json.loads(problem.answer), value)
        elif kind == "regex":
            assert re.fullmatch(value, problem.answer)
        else:
            assert problem.answer in value
        jsonschema.validate(json.loads(as_json(problem).answer), schema)


@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=lambda problem: problem.prompt)
def test_an_answer_in_an_object_is_the_same_answer(problem: Problem) -> None:
    asked = as_json(problem)
    assert asked.prompt == f"json {problem.prompt}"
    assert read(asked.answer) == read(problem.answer) == problem.answer


@pytest.mark.parametrize("text", ['{"answer": 1', '{"answer": 1, "b": 2}', "[1]", "x", ""])
def test_other_texts_are_no_answers_in_objects(text: str) -> None:
    assert read(text) == text


def test_a_table_counts_tasks_within_the_interval_and_passes() -> None:
    def way(*tasks: tuple[int, float]) -> dict[str, Any]:
        return {
            f"task {n}": {"right": right, "of": 100, "interval": [0.4, 0.6], "passes": passes}
            for n, (right, passes) in enumerate(tasks)
        }

    ways = {"free": way((50, 100.0), (50, 300.0)), "constrained": way((39, 120.0), (99, 300.0))}
    header, row = constrained_over_free({"tiny": {"plain": {"greedy": ways}}})
    assert len(header) == len(row)
    assert row[:4] == ["tiny", "plain", "greedy", "50.0 %"]
    assert row[5:] == ["69.0 %", "1 of 2", "1.05x", "1.20x"]
