"""What one schema's compiled constraint puts out and accepts, judged by independent validators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.configurations import END_OF_TEXT, START, Configurations
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits, ConstraintError

from canvas_grammar_support.schemas.corpora import Case, Instance
from canvas_grammar_support.schemas.spellings import all_spellings, offered_spellings
from canvas_grammar_support.schemas.validators import Judge
from canvas_grammar_support.schemas.walks import StuckError, Walker
from canvas_grammar_support.schemas.ways import Canvases, Whole

CANVAS, WINDOW = 32, 2048  # the tokens of a canvas, and the states that it may look at
EXTRA_TOKENS = 80  # how many tokens above the fewest a walk may take
KEYWORDS = (
    *("additionalProperties", "additionalItems", "allOf", "anyOf", "const", "contains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "enum", "exclusiveMaximum"),
    *("exclusiveMinimum", "format", "if", "then", "else", "items", "maxContains", "maxItems"),
    *("maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength"),
    *("minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties"),
    *("prefixItems", "properties", "propertyNames", "required", "type", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems", "$ref", "$dynamicRef", "$recursiveRef", "$id"),
    *("$anchor", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$vocabulary", "id", "extends"),
    *("nullable", "definitions", "$defs", "contentEncoding", "contentMediaType", "contentSchema"),
)


@dataclass
class Report:
    """The findings for one schema with one vocabulary.

    Attributes:
        refused: the message of a refusal, else None; then the rest is empty.
        problems: texts that are not valid, with the reason, and walks that did not end.
        valid: valid instances, and how many of them are accepted in some spelling.
        invalid: invalid instances, each in all spellings.
        wrong: texts of these that were accepted.
    """

    refused: str | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    valid: tuple[int, int] = (0, 0)
    invalid: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)


def check(
    case: Case, vocabulary: Vocabulary, walks: int, seed: int = 0, canvases: bool = False
) -> Report:
    """Compile a schema, walk through it, and read its instances (if each byte is a token).

    With `canvases` the walks are those of canvases with windows, and no instances are read, because
    a window need not have them.
    """
    report = Report()
    try:
        constraint = Constraint.from_value("json_schema", case.schema)
        compiled = compile_constraint(constraint, vocabulary, CompileLimits())
    except ConstraintError as error:
        report.refused = str(error)
        return report
    configurations = compiled.configurations()
    ways = Canvases(configurations, CANVAS, WINDOW) if canvases else Whole(configurations)
    walker = Walker(ways, vocabulary, seed)
    _walk(walker, configurations, Judge.of(case.schema, case.draft), walks, report)
    letters = byte_tokens(vocabulary)
    if len(letters) >= 255 and not canvases:  # marks begin with the other byte
        _read_instances(case, walker, letters, report)
    return report


def _walk(
    walker: Walker, configurations: Configurations, judge: Judge, walks: int, report: Report
) -> None:
    texts: dict[bytes, None] = {}

    def keep(tokens: list[int]) -> None:
        text = walker.text(tokens)
        texts[text] = None
        state = START
        for token in tokens:
            state = configurations.after(state, token)
        if state != END_OF_TEXT:
            report.problems.append((repr(text), "its tokens, read one by one, do not end"))

    random = Random(walks)
    for _ in range(walks):
        try:
            keep(walker.tokens(walker.minimum + random.randint(0, EXTRA_TOKENS)))
        except StuckError as error:
            report.problems.append(("", str(error)))
    try:
        for tokens in walker.cover(2 * walks):
            keep(tokens)
    except StuckError as error:
        report.problems.append(("", str(error)))
    for text in texts:
        if complaint := judge.complaint(text):
            report.problems.append((text.decode(errors="backslashreplace"), complaint))


def _read_instances(case: Case, walker: Walker, letters: Mapping[int, int], report: Report) -> None:
    def accepts(text: str) -> bool:
        return walker.accepts([*(letters[b] for b in text.encode()), walker.vocabulary.ends[0]])

    def taken(instance: Instance) -> bool:
        return any(map(accepts, offered_spellings(instance.data, case.schema)))

    valid = [instance for instance in case.instances if instance.valid]
    report.valid = (len(valid), sum(map(taken, valid)))
    invalid = [instance for instance in case.instances if not instance.valid]
    report.invalid = len(invalid)
    report.wrong = [
        (text, instance.description)
        for instance in invalid
        for text in all_spellings(instance.data, case.schema)
        if accepts(text)
    ]


def byte_tokens(vocabulary: Vocabulary) -> dict[int, int]:
    """The token of each byte that has one of its own."""
    first = vocabulary.offsets[:-1]
    single = [int(n) for n in (vocabulary.offsets[1:] - first == 1).nonzero()[0]]
    return {int(vocabulary.data[first[token]]): token for token in single}


def refused_for(message: str) -> str:
    """The keyword that a refusal names, or what else it is about."""
    for name in re.findall(r"keyword (\S+) is not supported", message):
        return name if name in KEYWORDS else "a keyword of no draft"
    if re.search(r"too large|at most|more than|deeper|takes longer", message):
        return "size"
    if "any JSON is allowed" in message:
        return "any JSON"
    words = re.findall(r"\$?[A-Za-z]+", message.partition(": ")[2] or message)
    if named := [word for word in words if word in {*KEYWORDS, "false"}]:
        return named[0]
    return re.sub(r"[\W\d]+", " ", message.partition(": ")[2] or message)[:40].strip()
