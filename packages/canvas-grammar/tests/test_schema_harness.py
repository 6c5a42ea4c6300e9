"""Would the checks of schemas find an error? Walks, validators, spellings, random schemas."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from canvas_grammar.automaton.configurations import START, Configurations
from canvas_grammar_support.helpers import compiled, record, tiny
from canvas_grammar_support.schemas.checks import byte_tokens, check
from canvas_grammar_support.schemas.corpora import LATEST, Case, Instance, suite_cases
from canvas_grammar_support.schemas.large_vocabulary import IDS, large
from canvas_grammar_support.schemas.spellings import all_spellings, offered_spellings, place_in_text
from canvas_grammar_support.schemas.strategies import whole_schemas
from canvas_grammar_support.schemas.validators import Judge, repeats_a_name, strict_readings
from canvas_grammar_support.schemas.walks import StuckError, Walker
from canvas_grammar_support.schemas.ways import Canvases, State, Ways, Whole
from hypothesis import HealthCheck, given, settings

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
# Long form: VLLM_DLLM_CASES=5000
CASES = int(os.environ.get("VLLM_DLLM_CASES", "50"))


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_schemas())
def test_what_compiles_offers_only_valid_texts(drawn: tuple[str, dict[str, Any]]) -> None:
    draft, schema = drawn
    report = check(Case("random", draft, schema, ()), tiny(), 20)
    assert report.refused or not report.problems, report.problems[:3]


# ---- walks


def states(schema: Any) -> Configurations:
    return compiled("json_schema", schema, tiny()).configurations()


class Planted:
    """The ways of a constraint with an error in one of their answers."""

    def __init__(self, ways: Ways) -> None:
        self.ways, self.start, self.class_of_token = ways, ways.start, ways.class_of_token.copy()

    def choices(self, state: State) -> list[tuple[np.ndarray, State]]:
        return self.ways.choices(state)

    def distance(self, state: State) -> int:
        return self.ways.distance(state)


class TooNear(Planted):
    def distance(self, state: State) -> int:
        return max(self.ways.distance(state) - 1, 0)


class Ambiguous(Planted):
    def choices(self, state: State) -> list[tuple[np.ndarray, State]]:
        return [*self.ways.choices(state), *self.ways.choices(state)]


def whole(schema: Any) -> Ways:
    return Whole(states(schema))


def canvases(schema: Any, length: int = 8, most: int = 20) -> Canvases:
    return Canvases(states(schema), length, most)


def test_walks_take_every_edge_of_a_small_automaton() -> None:
    numbers = {"type": "array", "items": INTEGER, "maxItems": 2}
    schema = record(a={"enum": ["x", 1, None]}, b=numbers) | {"additionalProperties": False}
    judge = Judge.of(schema, LATEST)
    configurations = states(schema)
    walker = Walker(Whole(configurations), tiny(), 0)
    for _ in range(200):
        tokens = walker.tokens(walker.minimum + 40)
        assert len(tokens) <= walker.minimum + 40 and tokens[-1] in tiny().ends
    _, taken = walker.coverage()
    assert all(judge.complaint(walker.text(tokens)) is None for tokens in walker.cover(400))
    edges = sum(
        len(configurations.moves(state).targets)
        for state in range(len(configurations.members))
        if configurations.distance[state]
    )
    assert walker.coverage() == (edges, edges) and 0.3 * edges < taken < edges


@pytest.mark.parametrize("ways", [whole, canvases])
def test_with_the_fewest_tokens_a_walk_still_ends(ways: Callable[[Any], Ways]) -> None:
    found = ways(record(a=STRING))
    walker = Walker(found, tiny(), 0)
    assert {walker.text(walker.tokens(walker.minimum)) for _ in range(20)} == {b'{"a":""}'}
    with pytest.raises(StuckError):
        Walker(TooNear(found), tiny(), 0).tokens(walker.minimum - 1)


def test_what_a_compiled_constraint_must_not_have() -> None:
    ways = whole(record(a=STRING))
    silent = next(n for n in range(272) if not len(Walker(ways, tiny(), 0).text([n])))
    planted = Planted(ways)
    planted.class_of_token[silent] = 0
    with pytest.raises(ValueError, match="without bytes"):
        Walker(planted, tiny(), 0)
    with pytest.raises(ValueError, match="leads to two states"):
        Walker(Ambiguous(ways), tiny(), 0).tokens(40)


def test_walks_through_canvases_nest_deeper_than_a_window() -> None:
    """A window of few states has few of a list in lists, and the next one has more of them."""
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
    }
    ways = canvases(schema)
    walker = Walker(ways, tiny(), 0)
    texts = {walker.text(walker.tokens(60)) for _ in range(200)}
    assert len(ways.windows) > 5 and not ways.whole
    assert max(text.count(b"[") for text in texts) > 10
    assert all(Judge.of(schema, LATEST).complaint(text) is None for text in texts)


def test_a_canvas_is_left_at_its_last_place_only() -> None:
    """What a window lacks is no choice, and what leads out of it in time is one."""
    ways = canvases(STRING, length=4, most=3)
    state = ways.start
    for place in range(4):
        assert state == (START, place, state[2])
        options = ways.choices(state)
        assert all(ways.distance(target) < 100 for _, target in options)
        state = max((target for _, target in options), key=lambda s: s[2])


def test_the_large_vocabulary() -> None:
    vocabulary = large()
    assert len(vocabulary) == IDS and len(vocabulary.ends) == 2
    assert len(byte_tokens(vocabulary)) == 256
    words = {vocabulary.data[a:b].tobytes() for a, b in zip(
        vocabulary.offsets, vocabulary.offsets[1:], strict=False)}  # fmt: skip
    assert {b'":"', b'"},{"', b" the", b"123", b'"type"'} <= words
    assert len(words) == IDS - 292  # all different, but for those without bytes


# ---- an error that was put in


@pytest.mark.parametrize(
    ("offered", "asked"),
    [
        (INTEGER, INTEGER | {"multipleOf": 2}),
        (record(a=STRING), record(a=STRING | {"maxLength": 5})),
        (STRING, {"type": "string", "format": "date"}),
        ({"type": "array", "items": INTEGER}, {"type": "array", "uniqueItems": True}),
        (record(a=INTEGER), record(a=INTEGER) | {"propertyNames": {"maxLength": 0}}),
        (record(a={"enum": [1, 2]}), record(a={"const": 1})),
    ],
)
def test_a_keyword_that_is_overlooked_is_found(
    offered: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = (Instance("no instance of either", False),)
    case = Case("planted", LATEST, asked, instances)
    monkeypatch.setattr(
        "canvas_grammar_support.schemas.checks.compile_constraint",
        lambda *_: compiled("json_schema", offered, tiny()),
    )
    report = check(case, tiny(), 100)
    assert report.problems
    assert not check(replace(case, schema=offered), tiny(), 100).problems


def test_an_invalid_instance_that_is_accepted_is_found() -> None:
    instances = (Instance({"b": 1, "a": "é"}, False), Instance({"a": "é", "b": [2]}, True))
    report = check(Case("planted", LATEST, record(a=STRING, b=INTEGER), instances), tiny(), 5)
    assert [text for text, _ in report.wrong] == ['{"a":"é","b":1}', '{"a": "é", "b": 1}']
    assert report.valid == (1, 0) and [place for place, _ in report.lost] == ["array here"]


# ---- validators


def test_the_validators_agree_with_the_suite() -> None:
    """Where one does not, or has no say, it is known why: the suite decides."""
    wrong: Counter[str] = Counter()
    asserted = 0
    for case in suite_cases():
        file = "/".join(case.name.split("/")[1:-1])
        if "/required/format/" in case.name or "/optional/" in case.name:
            continue  # asserts no formats; what implementations may leave out
        judge = Judge.of(case.schema, case.draft, remotes=True)
        for instance in case.instances:
            asserted += 1
            verdicts = judge.verdicts(instance.data)
            for name in ("jsonschema", "jsonschema-rs"):
                if verdicts.get(name) != instance.valid:
                    wrong[f"{name}: {file}"] += 1
    assert asserted > 4000
    assert wrong == {
        "jsonschema: draft2020-12/required/pattern": 3,  # \p{Letter} is no syntax of Python's
        "jsonschema: draft2020-12/required/patternProperties": 2,
        "jsonschema: draft2019-09/required/vocabulary": 1,
        "jsonschema: draft2020-12/required/vocabulary": 1,
        "jsonschema: draft2019-09/required/unevaluatedProperties": 4,  # has no say
    }


@pytest.mark.parametrize(
    ("value", "divisor", "valid"),
    [(0.07, 0.01, True), (123456789.1, 0.1, True), (0.075, 0.01, False), (4, 1.5, False),
     (4.5, 1.5, True), (-0.3, 0.1, True), (1e300, 3, False)],
)  # fmt: skip
def test_multiples_are_exact_for_both(value: float, divisor: float, valid: bool) -> None:
    judge = Judge.of({"multipleOf": divisor}, LATEST)
    assert set(judge.verdicts(value).values()) == {valid}


def test_the_rust_validator_asserts_formats_as_the_suite_does() -> None:
    for case in suite_cases():
        if "/optional/format/" in case.name:
            judge = Judge.of(case.schema, case.draft)
            for instance in case.instances:
                assert judge.verdicts(instance.data)["jsonschema-rs"] == instance.valid, case.name


@pytest.mark.parametrize(
    "text",
    [b'{"a":1', b"NaN", b"1e999", b'"\xff"', b'"\\ud800"', b"[1]", b'{"a":"x","a":1}', b"01",
     b'{"a":1,"a":"x"}'],
)  # fmt: skip
def test_texts_that_are_refused(text: bytes) -> None:
    judge = Judge.of({"properties": {"a": INTEGER}, "type": ["object", "number", "string"]}, LATEST)
    assert judge.complaint(text)
    assert judge.complaint(b'{"a":1,"a":2}') is None


def test_a_name_twice_is_noticed_at_any_depth() -> None:
    assert repeats_a_name(b'[{"a":{"b":1,"b":1}}]') and not repeats_a_name(b'[{"a":{"b":1}}]')
    assert list(strict_readings(b'{"b":1,"b":2}')) == [{"b": 2}, {"b": 1}]


# ---- spellings


def test_keys_are_written_in_the_order_of_the_schema() -> None:
    part = {"properties": {"z": {}, "y": {}}}
    schema = {
        "properties": {"b": {"items": {"$ref": "#/$defs/p"}}, "a": {}},
        "allOf": [{"properties": {"c": {}}}],
        "$defs": {"p": part},
    }
    value = {"d": 0, "c": 1, "a": 2, "b": [{"y": 3, "z": "é"}]}
    first, *_ = offered_spellings(value, schema)
    assert first == '{"b":[{"z":"é","y":3}],"a":2,"c":1,"d":0}'
    assert len(offered_spellings(value, schema)) == 4
    assert len(all_spellings(value, schema)) == 8
    assert all(json.loads(text) == value for text in all_spellings(value, schema))


@pytest.mark.parametrize(
    ("text", "stop", "place"),
    [
        ('{"ab":1}', 2, "key"),
        ('{"ab":1}', 1, "key"),
        ('{"ab": "é"}', 8, "inside a string"),
        ('{"ab":"é"}', 6, "string here"),
        ('{"a":"b","c":1}', 8, "further property"),
        ('{"a":"}"}', 8, "end of object"),
        ('["\\n"]', 2, "inside a string: escape"),
        ("[1.0]", 2, "inside a number"),
        ("[-10]", 1, "number here"),
        ("[true]", 2, "inside a word"),
        ("[[], 1]", 3, "further item"),
        ("[[]]", 2, "end of array"),
        ("[1, 2]", 3, "space"),
        ("[1]", 3, "end"),
    ],
)
def test_where_a_reader_stopped(text: str, stop: int, place: str) -> None:
    assert place_in_text(text, stop) == place
