"""Read grammars in Lark's notation, and decide which notation a grammar is written in."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from lark import Lark
from lark.exceptions import LarkError
from lark.grammar import Terminal
from lark.lexer import Pattern, PatternStr

from canvas_grammar.grammar.context_free import context_free
from canvas_grammar.grammar.ebnf import ebnf
from canvas_grammar.grammar.language import ANY, Node, chars, either, literal, repeat, sequence
from canvas_grammar.grammar.regex import inner_regex
from canvas_grammar.grammar.rules import Call, Rule, Without
from canvas_grammar.limits import CompileLimits, ConstraintError

# ---- The texts of one terminal of a Lark grammar.
#
# Lark matches a terminal with Python's `re` at a place of the text, and takes the one match that
# `re` finds there.

# Terminals of Lark's own library that look backwards, and expressions of the same matches.
EQUIVALENT = {
    r'".*?(?<!\\)(\\\\)*?"': r'"(?:[^"\\\n]|\\.)*"',  # common.ESCAPED_STRING
}


def terminal_language(name: str, pattern: Pattern) -> Node:
    """The texts that `re` finds as a match of a terminal's pattern.

    If a pattern has a repetition such as ``.*?``, which ends as soon as it can, these are the
    matches that do not begin with another match.

    Raises:
        ConstraintError: names the terminal.
    """
    if isinstance(pattern, PatternStr) and not pattern.flags:
        return literal(pattern.value)
    text = pattern.to_regexp()
    text = EQUIVALENT.get(text, text)
    try:
        language = inner_regex(text)
    except ConstraintError as error:
        raise ConstraintError(f"grammar: terminal {name}: {error}") from error
    if not _ends_early(parser.parse(text)):
        return language
    character = chars(ANY)
    return Without(language, sequence(language, character, repeat(character, 0, None)))


def _ends_early(tree: Any) -> bool:
    """Whether a parsed expression holds a repetition that matches as little as it can."""
    if isinstance(tree, parser.SubPattern | list | tuple):
        return any(_ends_early(part) for part in tree)
    return str(tree) == "MIN_REPEAT"


# ---- Grammars in the notation of the parser library Lark, which reads them itself.
#
# A grammar is read as a context-free one: a terminal is any text that its regular expression
# matches in full, and what `%ignore` names may stand after any terminal. That is how vLLM reads
# such a grammar. Lark's own parsers read text by a lexer first, which takes the longest
# terminal at each place, so that they may refuse a text in which a shorter one would have been
# right.

START = "start"
# Lark's own files of terminals. Others would be files of the server.
LIBRARIES = {"common", "python", "unicode", "lark"}


def lark_grammar(text: str, limits: CompileLimits) -> Node:
    """The language of a grammar's rule ``start``.

    Raises:
        ConstraintError: it is not Lark's notation, or not supported, with the reason.
    """
    try:
        # Only the rules from which Lark builds its parser are used, not the parser.
        read = Lark(text, start=START, parser="earley", lexer="dynamic", import_paths=[_import])
    except LarkError as error:
        raise ConstraintError(f"grammar: not a Lark grammar: {error}") from error
    except (ValueError, AssertionError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, ConstraintError):
            raise
        raise ConstraintError(f"grammar: Lark cannot read it: {error}") from error
    return context_free(_root(read))


def _import(base_path: Any, grammar_path: str) -> NoReturn:
    """Called by Lark to find a grammar to import; after an `OSError` it tries its own library."""
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


# ---- Grammars in either notation that vLLM takes: GBNF or Lark's.


def grammar(text: str, limits: CompileLimits) -> Node:
    """The language of a grammar.

    Raises:
        ConstraintError: the grammar is not supported, with the reason.
    """
    return lark_grammar(text, limits) if is_lark(text) else ebnf(text, limits)


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation rather than in GBNF, by the rule that vLLM has."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))
    return not any("::=" in line for line in lines)
