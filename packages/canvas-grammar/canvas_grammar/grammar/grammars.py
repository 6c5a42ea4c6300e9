r"""Read grammars in the two notations that vLLM takes: GBNF and Lark's.

GBNF is the notation of llama.cpp and xgrammar: ``root ::= "a" [0-9]+ | item{2,3}``. A text has the
meaning that xgrammar's reader gives it, which vLLM uses. That reader itself is not used, because
importing xgrammar imports torch and takes longer than a constraint may. xgrammar's extensions of
GBNF refer to tokens or steer its matcher, and are refused by name.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePosixPath
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import LarkError, VisitError
from lark.grammar import Terminal
from lark.lexer import PatternStr

from canvas_grammar.grammar.context_free import context_free
from canvas_grammar.grammar.language import (
    ANY,
    EMPTY_TEXT,
    Node,
    Range,
    chars,
    complement,
    either,
    literal,
    repeat,
    sequence,
    union,
)
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import Call, Rule, Without
from canvas_grammar.limits import CompileLimits, ConstraintError

ROOT = "root"
MACROS = {"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"}
# xgrammar's extensions, which are named if a text is not GBNF.
NOT_GBNF = {
    r"\(=": "lookahead, (= ...), is not supported with diffusion models",
    rf"\b({'|'.join(MACROS)})[ \t]*\(": "macros such as TagDispatch(...) are not supported with "
    "diffusion models",
    r"[\w.-]\[[^\]\n]*\][ \t]*::=": "attributes of rules are not supported with diffusion models",
}
# In xgrammar an escape of hexadecimal digits `\x` is as long as there are digits.
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
LETTERS = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0, "e": 27}
LETTERS |= {char: ord(char) for char in "'\"?\\/"}
CLASS_LETTERS = LETTERS | {char: ord(char) for char in "^$\\.*+?()[]{}|/-"}
GRAMMAR = r"""
start: rule+
rule: NAME "::=" choices
choices: sequence ("|" sequence)*
sequence: element+
element: atom (STAR | PLUS | OPTION | TIMES)?
?atom: "(" ")" -> nothing
    | "(" choices ")"
    | CLASS -> character
    | STRING -> string
    | REFERENCE -> call

NAME.2: /[A-Za-z_.-][A-Za-z0-9_.-]*(?=\s*::=)/
REFERENCE: /[A-Za-z_.-][A-Za-z0-9_.-]*/
STRING: /"(?:[^"\\\r\n]|\\.)*"/
CLASS: /\[\^?(?:[^\]\\\r\n]|\\[^\r\n])*\]/
STAR: "*"
PLUS: "+"
OPTION: "?"
TIMES: /\{[ \t\r\n]*\+?[0-9]+[ \t\r\n]*(?:,[ \t\r\n]*(?:\+?[0-9]+|-1)?[ \t\r\n]*)?\}/
%ignore /(?:[ \t\r\n]|#[^\r\n]*)+/
"""


def ebnf(text: str, limits: CompileLimits) -> Node:
    """The language of the rule ``root`` of a grammar in GBNF."""
    _refuse_deep(text, limits)
    try:
        tree = gbnf_parser().parse(text)
        return context_free(_RuleBuilder().transform(tree))
    except UnexpectedInput as error:
        reasons = [reason for sign, reason in NOT_GBNF.items() if re.search(sign, text)]
        raise ConstraintError(
            f"grammar: not GBNF in line {error.line}, column {error.column}: "
            f"{(reasons or [error.get_context(text, 30).strip()])[0]}"
        ) from error
    except VisitError as error:
        if isinstance(error.orig_exc, ConstraintError):
            raise error.orig_exc from None
        raise
    except LarkError as error:
        raise ConstraintError(f"grammar: not GBNF: {error}") from error


@cache
def gbnf_parser() -> Lark:
    """The parser of GBNF, which takes a while to build."""
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=False)


def _refuse_deep(text: str, limits: CompileLimits) -> None:
    depth = 0
    for match in re.finditer(r'"(?:[^"\\\r\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\r\n]*|[()]', text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth > limits.depth:
            raise ConstraintError(f"grammar: nested deeper than {limits.depth}")


@v_args(inline=True)
class _RuleBuilder(Transformer[Token, Rule]):
    """Turns the tree of a grammar's text into its root; methods are named as the rules above."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[str, Rule] = {}
        self.called: dict[str, Token] = {}

    def start(self, *rules: tuple[Token, Node]) -> Rule:
        defined: set[str] = set()
        for name, body in rules:
            if name in defined:
                raise _error(name, f"rule {name} is defined twice")
            defined.add(str(name))
            self._rule(str(name)).body = body
        for called, token in self.called.items():
            if called not in defined:
                raise _error(token, f"rule {called} is not defined")
        if ROOT not in defined:
            raise ConstraintError(f"grammar: there is no rule {ROOT}, which a text begins with")
        return self.rules[ROOT]

    def rule(self, name: Token, body: Node) -> tuple[Token, Node]:
        return name, body

    def choices(self, *options: Node) -> Node:
        return either(options)

    def sequence(self, *parts: Node) -> Node:
        return sequence(*parts)

    def element(self, part: Node, times: Token | None = None) -> Node:
        if times is None:
            return part
        simple = {"STAR": (0, None), "PLUS": (1, None), "OPTION": (0, 1)}
        return repeat(part, *(simple.get(times.type) or _times(times)))

    def nothing(self) -> Node:
        return EMPTY_TEXT

    def string(self, token: Token) -> Node:
        return literal("".join(map(chr, _codes(token, token[1:-1], LETTERS))))

    def character(self, token: Token) -> Node:
        negated = token.startswith("[^")
        ranges = union(_ranges(token, token[2 if negated else 1 : -1]))
        return chars(complement(ranges) if negated else ranges)

    def call(self, name: Token) -> Node:
        if name in MACROS:
            raise _error(name, f"{name}(...) is not supported with diffusion models")
        self.called.setdefault(str(name), name)
        return Call(self._rule(str(name)))

    def _rule(self, name: str) -> Rule:
        return self.rules.setdefault(name, Rule(name))


def _error(token: Token, reason: str) -> ConstraintError:
    return ConstraintError(f"grammar, line {token.line}, column {token.column}: {reason}")


def _times(token: Token) -> tuple[int, int | None]:
    first, comma, second = token[1:-1].partition(",")
    least = int(first)
    most = int(second) if second.strip() else None if comma else least
    if most is not None and 0 <= most < least:
        raise _error(token, f"{token}: the lower bound is above the upper one")
    return least, None if most == -1 else most


def _codes(token: Token, text: str, letters: dict[str, int]) -> list[int]:
    """The code points of a text with escapes."""
    found, place = [], 0
    while place < len(text):
        if text[place] != "\\":
            found.append(ord(text[place]))
            place += 1
            continue
        match = ESCAPE.match(text, place)
        code = letters.get(match[4], -1) if match and match[4] else -1
        if match and match[4] is None:
            code = int(match[match.lastindex or 0], 16)
        if not match or not 0 <= code <= 0x10FFFF:
            raise _error(token, f"{token}: no such character: {text[place : place + 10]}")
        found.append(code)
        place = match.end()
    return found


def _ranges(token: Token, text: str) -> list[Range]:
    """The ranges of a character class without its brackets."""
    pieces = re.findall(r"\\x[0-9A-Fa-f]+|\\u.{0,4}|\\U.{0,8}|\\.|[^\\]", text, re.DOTALL)
    for piece in pieces:
        if piece in (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"):
            raise _error(token, f"{token}: {piece} is not supported in GBNF; write the characters")
    codes = [_codes(token, piece, CLASS_LETTERS)[0] for piece in pieces]
    ranges, place = [], 0
    while place < len(pieces):
        first = last = codes[place]
        if pieces[place + 1 : place + 2] == ["-"] and place + 2 < len(pieces):
            last = codes[place + 2]
            place += 2
        if last < first:
            raise _error(token, f"{token}: the lower bound is above the upper one")
        ranges.append((first, last))
        place += 1
    return ranges


# Terminals of Lark's own library that look backwards, and expressions of the same matches.
EQUIVALENT = {
    r'".*?(?<!\\)(\\\\)*?"': r'"(?:[^"\\\n]|\\.)*"'  # common.ESCAPED_STRING
}


def _terminal(read: Lark, name: str) -> Node:
    """The texts that `re` finds as a match of a terminal's pattern.

    If a pattern has a repetition such as ``.*?``, which ends as soon as it can, these are the
    matches that do not begin with another match.
    """
    defined = {str(terminal.name): terminal.pattern for terminal in read.terminals}
    if name not in defined:
        raise ConstraintError(f"grammar: terminal {name} is declared, but not defined")
    pattern = defined[name]
    if isinstance(pattern, PatternStr) and not pattern.flags:
        return literal(pattern.value)
    text = pattern.to_regexp()
    text = EQUIVALENT.get(text, text)
    try:
        language = regex(text, at_the_ends=False)
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
    """The language of the rule ``start`` of a grammar in Lark's notation."""
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


def grammar(text: str, limits: CompileLimits) -> Node:
    """The language of a grammar.

    Raises:
        ConstraintError: it is not in its notation, or not supported, with the place or reason.
    """
    return lark_grammar(text, limits) if is_lark(text) else ebnf(text, limits)


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation rather than in GBNF, by the rule that vLLM has."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))
    return not any("::=" in line for line in lines)
