"""What a JSON schema offers, without automata: read and drawn from its language."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from canvas_grammar.grammar.json.reader import read_schema
from canvas_grammar.grammar.language import Node
from canvas_grammar.limits import CompileLimits, ConstraintError
from jsonschema.validators import validator_for

from canvas_grammar_support.derivations import derives, drawn

LIMITS = CompileLimits()


def language(schema: Any) -> Node:
    """The language of a schema that is sent as text, in which no object occurs twice."""
    return read_schema(json.loads(json.dumps(schema))).node


def offers(schema: Any, text: str) -> bool:
    return derives(language(schema), text)


def validator_of(schema: Any) -> Any:
    """An independent judge, which checks formats as well."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def offered(schema: Any, *texts: str) -> str:
    """Which of some texts are offered, each of them and some more checked by `jsonschema`."""
    node, validator = language(schema), validator_of(schema)
    for text in drawn(node, 20):
        validator.validate(json.loads(text))
    taken = [text for text in texts if derives(node, text)]
    for text in taken:
        validator.validate(json.loads(text))
    return " ".join(taken)


def refusal(schema: Any) -> str:
    """The message with which a schema is refused."""
    with pytest.raises(ConstraintError) as caught:
        language(schema)
    return str(caught.value)
