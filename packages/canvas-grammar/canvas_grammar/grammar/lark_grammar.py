r"""Grammars in the notation of the parser library Lark, which reads them itself.

A grammar is read as a context-free one: a terminal is any text that its regular expression matches
in full, and what `%ignore` names may stand behind any terminal. That is what vLLM makes of such a
grammar. Lark's own parsers read text by a lexer first, which takes the longest terminal at each
place, so that they may refuse a text in which a shorter one would have been right.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, NoReturn

from lark import Lark
from lark.exceptions import LarkError
from lark.grammar import Terminal

from canvas_grammar.grammar.context_free import context_free
from canvas_grammar.grammar.language import Node, either, repeat, sequence
from canvas_grammar.grammar.lark_terminals import terminal_language
from canvas_grammar.grammar.rules import Call, Rule
from canvas_grammar.limits import CompileLimits, ConstraintError

START = "start"
# Lark's own files of terminals. Others would be files of the server.
LIBRARIES = {"common", "python", "unicode", "lark"}


def lark_grammar(text: str, limits: CompileLimits) -> Node:
    """The language of a grammar's rule ``start``.

    Raises:
        ConstraintError: it is not Lark's notation, or not supported, with the reason.
    """
    try:
        # The parser that Lark builds of it is not used, only the rules that it is built from.
        read = Lark(text, start=START, parser="earley", lexer="dynamic", import_paths=[_import])
    except LarkError as error:
        raise ConstraintError(f"grammar: not a Lark grammar: {error}") from error
    except (ValueError, AssertionError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, ConstraintError):
            raise
        raise ConstraintError(f"grammar: Lark cannot read it: {error}") from error
    return context_free(_root(read))


def _import(base_path: Any, grammar_path: str) -> NoReturn:
    """What Lark calls to find a grammar to import; `OSError` lets it look in its own library."""
    if base_path is None and PurePosixPath(grammar_path).stem in LIBRARIES:
        raise FileNotFoundError(grammar_path)
    raise ConstraintError(
        f"grammar: %import of {grammar_path} is not supported; {', '.join(sorted(LIBRARIES))} are"
    )


def _root(read: Lark) -> Rule:
    gap = repeat(either(_terminal(read, name) for name in read.ignore_tokens), 0, None)
    terminals: dict[str, Node] = {}
    rules: dict[str, Rule] = {}
    options: dict[str, list[Node]] = {}
    for rule in read.rules:
        parts: list[Node] = []
        for symbol in rule.expansion:
            name = str(symbol.name)
            if not isinstance(symbol, Terminal):
                parts.append(Call(rules.setdefault(name, Rule(name))))
                continue
            if name not in terminals:
                terminals[name] = sequence(_terminal(read, name), gap)
            parts.append(terminals[name])
        options.setdefault(str(rule.origin.name), []).append(sequence(*parts))
    for name, found in options.items():
        rules.setdefault(name, Rule(name)).body = either(found)
    return rules[START]


def _terminal(read: Lark, name: str) -> Node:
    defined = {str(terminal.name): terminal.pattern for terminal in read.terminals}
    if name not in defined:
        raise ConstraintError(f"grammar: terminal {name} is declared, but not defined")
    return terminal_language(name, defined[name])
