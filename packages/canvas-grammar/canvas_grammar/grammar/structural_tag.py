"""Read structural tags: fixed texts around schemas and expressions, and free text around those.

Both the notation and its meaning are xgrammar's, which vLLM's tool parsers use. Formats that refer
to tokens rather than text are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canvas_grammar.grammar.free_text import dispatched, free_text
from canvas_grammar.grammar.grammars import ebnf
from canvas_grammar.grammar.json.calls import STYLES, gemma_arguments, xml_arguments
from canvas_grammar.grammar.json.reader import SchemaLanguage, read_schema
from canvas_grammar.grammar.json.values import short
from canvas_grammar.grammar.language import Node, either, optional, repeat, sequence
from canvas_grammar.grammar.marks import GEMMA, LENIENT, Marks
from canvas_grammar.grammar.regex import regex
from canvas_grammar.limits import CompileLimits, ConstraintError

# Fields that never allow more than a format allows without them, so they are skipped: properties
# stand in the order of the schema, with at most one space between tokens of JSON.
NARROWER: dict[str, tuple[Any, ...]] = {"any_order": (False, True), "excludes": ([],)}
Format = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """The place where a format stands."""

    depth: int = 0  # the number of formats around it
    ends: tuple[str, ...] = ()  # of the tags around it, which free text in them does not contain


def structural_tag(value: Any, limits: CompileLimits, marks: Marks | None = None) -> Node:
    """The language of a structural tag, in its present form or the one with ``structures``.

    Raises:
        ConstraintError: a format is not supported; the message names it.
    """
    return read_structural_tag(value, limits, marks or Marks())[0]


def read_structural_tag(
    value: Any, limits: CompileLimits, marks: Marks
) -> tuple[Node, tuple[str, ...]]:
    """Do what `structural_tag` does, and also return the ignored keywords of its schemas."""
    reader = _TagReader(limits, marks)
    return reader.format(_format_of(value), Place()), tuple(reader.ignored)


def _format_of(value: Any) -> Any:
    """The format of a structural tag, even if the tag is in the older form."""
    fields = set(value) - {"type"} if isinstance(value, Mapping) else set()
    if fields == {"format"}:
        return value["format"]
    if fields != {"structures", "triggers"}:
        raise ConstraintError("structural_tag is an object with a format, or structures, triggers")
    tags = [_tag_of_structure(part) for part in _list(value["structures"])]
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


def _tag_of_structure(part: Any) -> Format:
    if not isinstance(part, Mapping) or set(part) != {"begin", "schema", "end"}:
        raise ConstraintError("structural_tag: a structure has begin, schema and end")
    content = {"type": "json_schema", "json_schema": part["schema"]}
    return {"type": "tag", "begin": part["begin"], "content": content, "end": part["end"]}


class _TagReader:
    def __init__(self, limits: CompileLimits, marks: Marks) -> None:
        self.limits = limits
        self.marks = marks
        self.ignored: dict[str, None] = {}
        self.kinds: dict[str, tuple[set[str], Callable[[Format, Place], Node]]] = {
            "const_string": ({"value"}, lambda f, _: self._written(f["value"])),
            "regex": ({"pattern"}, lambda f, _: regex(_text(f["pattern"]))),
            "grammar": ({"grammar"}, lambda f, _: ebnf(_text(f["grammar"]), limits)),
            "json_schema": ({"json_schema", "max_whitespace_cnt", "style", LENIENT}, self._schema),
            "any_text": ({"excludes", "max_chars", "max_tokens"}, self._any_text),
            "tag": ({"begin", "content", "end"}, self._tag),
            "triggered_tags": (
                {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
                self._triggered,
            ),
            "dispatch": ({"rules", "loop", "excludes"}, self._dispatch),
            "sequence": ({"elements"}, lambda f, place: sequence(*self._all(f, place))),
            "or": ({"elements"}, lambda f, place: either(self._all(f, place))),
            "optional": ({"content"}, lambda f, place: optional(self._content(f, place))),
            "plus": ({"content"}, lambda f, place: repeat(self._content(f, place), 1, None)),
            "star": ({"content"}, lambda f, place: repeat(self._content(f, place), 0, None)),
            "repeat": ({"content", "min", "max"}, self._repeat),
            "tags_with_separator": (
                {"tags", "separator", "at_least_one", "stop_after_first"},
                self._separated,
            ),
        }

    def format(self, value: Any, place: Place) -> Node:
        """The language of one format."""
        if place.depth > self.limits.depth:
            raise ConstraintError(f"structural_tag: nested deeper than {self.limits.depth}")
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind not in self.kinds:
            raise ConstraintError(
                f"structural_tag: format {short(kind)} is not supported with diffusion models; "
                f"supported: {', '.join(self.kinds)}"
            )
        fields, read = self.kinds[kind]
        for name, content in value.items():
            if name not in fields | {"type"} and content not in NARROWER.get(name, ()):
                raise ConstraintError(f"structural_tag: {kind} has {name}, which is not supported")
        try:
            return read(value, replace(place, depth=place.depth + 1))
        except KeyError as error:
            raise ConstraintError(f"structural_tag: {kind} has no {error}") from error

    def _content(self, value: Format, place: Place) -> Node:
        return self.format(value["content"], place)

    def _all(self, value: Format, place: Place) -> list[Node]:
        return [self.format(element, place) for element in _list(value["elements"])]

    def _schema(self, value: Format, place: Place) -> Node:
        blanks = value.get("max_whitespace_cnt")
        if blanks is not None and not (isinstance(blanks, int) and blanks > 0):
            raise ConstraintError("structural_tag: max_whitespace_cnt is a positive number")
        style = value.get("style", "json")
        if style == "json":
            return self._read(value, read_schema)
        if style == GEMMA:
            return self._read(value, partial(gemma_arguments, marks=self.marks))
        if style not in STYLES:
            raise ConstraintError(
                f"structural_tag: style {short(style)} is not supported with diffusion models; "
                f"supported: json, {', '.join(STYLES)}"
            )
        # Qwen's calls have line ends around values, and MiMo's, of the same style, have not.
        wrapped = style == "qwen_xml" and any(end.startswith("\n") for end in place.ends[-1:])
        read = partial(xml_arguments, style=STYLES[style], marks=self.marks, wrapped=wrapped)
        return self._read(value, read)

    def _read(self, value: Format, read: Callable[[Any], SchemaLanguage]) -> Node:
        try:
            found = read(value["json_schema"])
        except ConstraintError:
            if value.get(LENIENT) is not True:
                raise
            found = read({"type": "object"})
        self.ignored |= dict.fromkeys(found.ignored)
        return found.node

    def _any_text(self, value: Format, place: Place) -> Node:
        if value.get("max_tokens") is not None:
            raise ConstraintError("structural_tag: any_text has max_tokens, which is not supported")
        most = value.get("max_chars")
        if most is not None and not (isinstance(most, int) and most >= 0):
            raise ConstraintError("structural_tag: max_chars is a number")
        return free_text(self._without(value, place), self.marks, most)

    def _without(self, value: Format, place: Place) -> list[str]:
        """Texts that free text at a place does not contain."""
        return [*_texts(value.get("excludes", [])), *place.ends]

    def _tag(self, value: Format, place: Place) -> Node:
        return sequence(self._written(value["begin"]), self._after_begin(value, place))

    def _written(self, text: Any) -> Node:
        return self.marks.written(_text(text))

    def _after_begin(self, value: Format, place: Place) -> Node:
        """The content and the end of a tag."""
        ends = _texts(value["end"] if isinstance(value["end"], list) else [value["end"]])
        inside = replace(place, ends=place.ends + tuple(ends))
        return sequence(self._content(value, inside), either(map(self._written, ends)))

    def _tags(self, value: Format, place: Place) -> list[tuple[str, Node]]:
        """The beginnings of tags, and what follows each of them."""
        tags = _list(value["tags"])
        if not tags or any(not isinstance(t, Mapping) or t.get("type") != "tag" for t in tags):
            raise ConstraintError("structural_tag: tags is a list of formats of type tag")
        return [(_text(tag["begin"]), self._after_begin(tag, place)) for tag in tags]

    def _triggered(self, value: Format, place: Place) -> Node:
        tags, triggers = self._tags(value, place), _texts(value["triggers"])
        after: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        for begin, rest in tags:
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise ConstraintError(
                    f"structural_tag: {short(begin)} must begin with one of the triggers"
                )
            after[found[0]].append(sequence(self._written(begin.removeprefix(found[0])), rest))
        loop = not value.get("stop_after_first", False)
        bodies = {trigger: either(options) for trigger, options in after.items()}
        prose = dispatched(bodies, self._without(value, place), self.marks, loop)
        if not value.get("at_least_one", False):
            return prose
        first = either(sequence(self._written(begin), rest) for begin, rest in tags)
        return sequence(first, prose) if loop else first  # no free text in front of the first one

    def _dispatch(self, value: Format, place: Place) -> Node:
        bodies = {}
        for rule in _list(value["rules"]):
            if not isinstance(rule, list) or len(rule) != 2 or rule[0] in bodies:
                raise ConstraintError("structural_tag: rules are pairs of a pattern and a format")
            bodies[_text(rule[0])] = self.format(rule[1], place)
        loop = value.get("loop", True)
        return dispatched(bodies, self._without(value, place), self.marks, loop)

    def _repeat(self, value: Format, place: Place) -> Node:
        least, most = value["min"], value["max"]
        if not isinstance(least, int) or not isinstance(most, int) or least < 0 or most < -1:
            raise ConstraintError("structural_tag: min and max of repeat are numbers, or max is -1")
        return repeat(self._content(value, place), least, None if most == -1 else most)

    def _separated(self, value: Format, place: Place) -> Node:
        found = self._tags(value, place)
        tag = either(sequence(self._written(begin), rest) for begin, rest in found)
        tags = tag
        if not value.get("stop_after_first"):
            further = sequence(self._written(value["separator"]), tag)
            tags = sequence(tag, repeat(further, 0, None))
        return tags if value.get("at_least_one") else optional(tags)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConstraintError(f"structural_tag: a list is expected, got {short(value)}")
    return value


def _texts(value: Any) -> list[str]:
    return list(map(_text, _list(value)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConstraintError(f"structural_tag: a text is expected, got {short(value)}")
    return value
