"""Structural tags: fixed texts around schemas and expressions, as in tool calls.

The notation is xgrammar's, which vLLM's tool parsers use. Free text between tags (`any_text`,
`triggered_tags`) is refused, because nothing says where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dllm.constraints.grammar.json.layout import short
from vllm_dllm.constraints.grammar.json.reader import json_schema
from vllm_dllm.constraints.grammar.language import Node, either, literal, optional, repeat, sequence
from vllm_dllm.constraints.grammar.regex import regex
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

# Fields that are ignored if they have this value, and refused otherwise.
DEFAULTS: Mapping[str, Any] = {
    "style": "json",
    "any_order": False,
    "max_whitespace_cnt": None,
    "excludes": [],
}


def structural_tag(value: Any, limits: CompileLimits) -> Node:
    """The language of a structural tag.

    Raises:
        ConstraintError: names the format that is not supported.
    """
    if not isinstance(value, Mapping) or set(value) - {"type"} != {"format"}:
        raise ConstraintError("structural_tag is an object with a format")
    return _TagReader(limits).format(value["format"], 0)


class _TagReader:
    def __init__(self, limits: CompileLimits) -> None:
        self.limits = limits
        self.kinds: dict[str, tuple[set[str], Callable[[Mapping[str, Any], int], Node]]] = {
            "const_string": ({"value"}, lambda f, _: literal(_text(f["value"]))),
            "regex": ({"pattern"}, lambda f, _: regex(_text(f["pattern"]))),
            "json_schema": ({"json_schema"}, self._schema),
            "tag": ({"begin", "content", "end"}, self._tag),
            "sequence": ({"elements"}, lambda f, depth: sequence(*self._all(f, depth))),
            "or": ({"elements"}, lambda f, depth: either(self._all(f, depth))),
            "optional": ({"content"}, lambda f, depth: optional(self._content(f, depth))),
            "plus": ({"content"}, lambda f, depth: repeat(self._content(f, depth), 1, None)),
            "star": ({"content"}, lambda f, depth: repeat(self._content(f, depth), 0, None)),
            "tags_with_separator": (
                {"tags", "separator", "at_least_one", "stop_after_first"},
                self._separated,
            ),
        }

    def format(self, value: Any, depth: int) -> Node:
        """The language of one format."""
        if depth > self.limits.depth:
            raise ConstraintError(f"structural_tag: nested deeper than {self.limits.depth}")
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind not in self.kinds:
            raise ConstraintError(
                f"structural_tag: format {short(kind)} is not supported with diffusion models "
                f"(free text need not end); supported: {', '.join(self.kinds)}"
            )
        fields, read = self.kinds[kind]
        for name, content in value.items():
            if name not in fields | {"type"} and content != DEFAULTS.get(name, ...):
                raise ConstraintError(f"structural_tag: {kind} has {name}, which is not supported")
        try:
            return read(value, depth + 1)
        except KeyError as error:
            raise ConstraintError(f"structural_tag: {kind} has no {error}") from error

    def _content(self, value: Mapping[str, Any], depth: int) -> Node:
        return self.format(value["content"], depth)

    def _all(self, value: Mapping[str, Any], depth: int, name: str = "elements") -> list[Node]:
        if not isinstance(value[name], list):
            raise ConstraintError(f"structural_tag: {name} is a list")
        return [self.format(element, depth) for element in value[name]]

    def _schema(self, value: Mapping[str, Any], depth: int) -> Node:
        if value["json_schema"] is True:
            raise ConstraintError(
                "structural_tag: any JSON nests without end, which no automaton can follow; give "
                'tools "strict": true, and their parameters are followed'
            )
        return json_schema(value["json_schema"], self.limits)

    def _tag(self, value: Mapping[str, Any], depth: int) -> Node:
        ends = value["end"] if isinstance(value["end"], list) else [value["end"]]
        begin = literal(_text(value["begin"]))
        return sequence(begin, self._content(value, depth), either(literal(_text(e)) for e in ends))

    def _separated(self, value: Mapping[str, Any], depth: int) -> Node:
        tag = either(self._all(value, depth, "tags"))
        tags = tag
        if not value.get("stop_after_first"):
            further = sequence(literal(_text(value["separator"])), tag)
            tags = sequence(tag, repeat(further, 0, None))
        return tags if value.get("at_least_one") else optional(tags)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConstraintError(f"structural_tag: a text is expected, got {short(value)}")
    return value
