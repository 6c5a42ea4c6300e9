"""JSON Schema's own test suite and real schemas: nothing that is offered or accepted is invalid.

A part of them, and random schemas. `VLLM_DLLM_SCHEMAS=1` checks every schema, and
`VLLM_DLLM_CASES=5000` so many random ones.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import mistral_common
import numpy as np
import pytest
from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.configurations import END_OF_TEXT, NO_STATE, START, Configurations
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits, ConstraintError
from canvas_grammar_support.helpers import text_of, tiny
from canvas_grammar_support.schemas.corpora import DRAFTS, REAL, Case, real_cases, suite_cases
from canvas_grammar_support.schemas.strategies import whole_schemas
from canvas_grammar_support.schemas.validators import Judge
from hypothesis import HealthCheck, given, settings

# One of so many schemas is checked with each vocabulary. Drafts repeat each other's schemas, so
# what one draft's part leaves out another's often has.
PART = int(os.environ.get("VLLM_DLLM_SCHEMAS", "0"))
OF_SUITE, OF_SUITE_LARGE, OF_REAL, OF_REAL_LARGE = (PART,) * 4 if PART else (24, 300, 60, 400)
RANDOM = int(os.environ.get("VLLM_DLLM_CASES", "50"))
WALKS = 25
EXTRA_TOKENS = 80  # how many tokens above the fewest a walk may take
# Groups of real schemas of which some have patterns that take minutes to become automata. A server
# lets others go first, and here nothing ends a compilation.
WITH_LONG_ONES = ("Handwritten", "JsonSchemaStore", "Snowplow")
TOO_LARGE = re.compile(r"too large|at most|more than|deeper|takes longer")


@functools.cache
def published() -> Vocabulary:
    """A real byte-level vocabulary of about 150,000 ids."""
    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    return Vocabulary.from_tokens([*tokens, b""], [len(tokens)])


class Walker:
    """Random walks through a compiled constraint, token by token: what a canvas could put out."""

    def __init__(self, configurations: Configurations, seed: int) -> None:
        self.configurations, self.random = configurations, Random(seed)
        classes = configurations.tables.class_of_token
        order = np.argsort(classes, kind="stable")
        first = np.searchsorted(classes[order], np.arange(configurations.tables.classes + 1))
        self.tokens_of_class = np.split(order, first)[1:-1]
        self.visits: Counter[tuple[int, int]] = Counter()

    def tokens(self, budget: int) -> list[int]:
        """The tokens of one random output of at most `budget` tokens, the end included."""
        state, found = START, list[int]()
        is_curious = self.random.random() < 0.5
        while state != END_OF_TEXT:
            moves = self.configurations.moves(state)
            left = budget - len(found) - 1
            ways = [
                (target, label)
                for target, label in zip(moves.targets.tolist(), moves.labels.tolist(), strict=True)
                if self.configurations.distance[target] <= left
            ]
            assert ways, f"no token of {left + 1} leads on from {found}"
            self.random.shuffle(ways)
            if is_curious:
                ways.sort(key=lambda way: self.visits[state, way[0]])
            target, label = ways[0]
            self.visits[state, target] += 1
            kind = self.random.choice(self.configurations.labels[label].tolist())
            found.append(int(self.random.choice(self.tokens_of_class[kind])))
            state = target
        return found

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, read one by one, are an output."""
        state = START
        for token in tokens:
            state = self.configurations.after(state, token) if state != NO_STATE else state
        return state == END_OF_TEXT


def names_in(schema: Any) -> Iterator[str]:
    """The names of all properties, in the order in which a schema has them."""
    if isinstance(schema, dict):
        named = schema.get("properties")
        yield from named if isinstance(named, dict) else ()
    if isinstance(schema, dict | list):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from names_in(part)


def ordered(value: Any, places: dict[str, int]) -> Any:
    """The value with the keys of objects in the order of a schema, then the others."""
    if isinstance(value, list):
        return [ordered(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: places.get(name, len(places)))
    return {name: ordered(value[name], places) for name in names}


def spellings(value: Any, schema: Any) -> set[str]:
    """Ways to write a JSON value; without those that have a lone surrogate, which is no text."""
    places = {name: n for n, name in enumerate(dict.fromkeys(names_in(schema)))}
    found = {
        json.dumps(each, separators=style, ensure_ascii=ascii)
        for each in (value, ordered(value, places))
        for style in ((",", ":"), (", ", ": "))
        for ascii in (False, True)
    }
    return {text for text in found if not re.search("[\ud800-\udfff]", text)}


class Report:
    """What one schema's compiled constraint puts out and accepts.

    Attributes:
        refused: the message of a refusal, else None; then the rest is empty.
        problems: texts that are not valid, with the reason.
        valid, accepted: how many instances are valid, and how many of those are accepted in some
            spelling.
    """

    def __init__(self, case: Case, vocabulary: Vocabulary, walks: int = WALKS) -> None:
        self.refused: str | None = None
        self.problems: list[tuple[str, str]] = []
        self.valid = self.accepted = 0
        try:
            constraint = Constraint.from_value("json_schema", case.schema)
            compiled = compile_constraint(constraint, vocabulary, CompileLimits())
        except ConstraintError as error:
            self.refused = str(error)
            return
        walker = Walker(compiled.configurations(), seed=0)
        judge, texts = Judge(case.schema, case.draft), set[bytes]()
        for _ in range(walks):
            tokens = walker.tokens(compiled.minimum + walker.random.randint(0, EXTRA_TOKENS))
            assert walker.accepts(tokens)
            texts.add(text_of(vocabulary, tokens))
        complaints = {text: judge.complaint(text) for text in texts}
        self.problems += [(repr(text), said) for text, said in complaints.items() if said]
        if vocabulary is tiny():
            self._read_instances(case, walker)

    def _read_instances(self, case: Case, walker: Walker) -> None:
        letters, (end, *_) = byte_tokens(), tiny().ends
        for value, is_valid, description in case.instances:
            taken = [
                text
                for text in spellings(value, case.schema)
                if walker.accepts([*(letters[byte] for byte in text.encode()), end])
            ]
            if not is_valid:
                self.problems += [(text, description) for text in taken]
            self.valid += is_valid
            self.accepted += is_valid and bool(taken)


@functools.cache
def byte_tokens() -> dict[int, int]:
    """The token of each byte."""
    texts = [text_of(tiny(), [token]) for token in range(len(tiny()))]
    return {text[0]: token for token, text in enumerate(texts) if len(text) == 1}


def reports(cases: Sequence[Case], divisor: int, vocabulary: Vocabulary) -> list[Report]:
    """Those of a part of the cases that compile, the same in every run; none has a problem."""
    compiled, wrong = [], []
    for case in cases:
        if zlib.crc32(case.name.encode()) % divisor:
            continue
        report = Report(case, vocabulary)
        if report.refused is None:
            compiled.append(report)
            wrong += [f"{case.name}: {text[:300]} ({why})" for text, why in report.problems[:1]]
        else:
            named = TOO_LARGE.search(report.refused) or re.match(r"\S+: ", report.refused)
            assert named, f"{case.name}: a place comes first in {report.refused}"
    assert not wrong, "\n".join(wrong)
    return compiled


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite(draft: str) -> None:
    cases = [case for case in suite_cases() if case.draft == draft]
    compiled = reports(cases, OF_SUITE, tiny())
    valid = sum(report.valid for report in compiled)
    assert sum(report.accepted for report in compiled) > 0.4 * valid > 2


def test_the_suite_with_a_large_vocabulary() -> None:
    assert len(reports(suite_cases(), OF_SUITE_LARGE, published())) > 2


@settings(max_examples=RANDOM, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_schemas())
def test_random_schemas(drawn: tuple[str, dict[str, Any]]) -> None:
    draft, schema = drawn
    report = Report(Case("random", draft, schema, ()), tiny())
    assert not report.problems, report.problems[:3]


@pytest.mark.skipif(not REAL.exists(), reason="../shared/json_schemas is not beside the project")
@pytest.mark.parametrize(
    ("vocabulary", "divisor"), [(tiny, OF_REAL), (published, OF_REAL_LARGE)], ids=["tiny", "large"]
)
def test_real_schemas(vocabulary: Any, divisor: int) -> None:
    cases = [case for case in real_cases() if case.name.split("/")[1] not in WITH_LONG_ONES]
    assert reports(cases, divisor, vocabulary())
