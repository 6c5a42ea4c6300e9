r"""Grammars in GBNF, the notation of llama.cpp and xgrammar: ``root ::= "a" [0-9]+ | item{2,3}``.

A text has the meaning that xgrammar's reader of this notation gives it, which is the one that vLLM
uses. That reader itself is not used, because importing xgrammar imports torch and takes longer than
a constraint may. A text with U+0000 or a surrogate never belongs to the language.

xgrammar's extensions of GBNF refer to tokens or steer its matcher, and are refused by name:
lookahead, macros and the attributes of rules.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import LarkError, VisitError

from canvas_grammar.grammar.context_free import context_free
from canvas_grammar.grammar.language import (
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
from canvas_grammar.grammar.rules import Call, Rule
from canvas_grammar.limits import CompileLimits, ConstraintError

ROOT = "root"
MACROS = {"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"}
# xgrammar's extensions of GBNF, which are named if a text is not GBNF.
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
    | "(" choices ")" -> group
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
    """The language of a grammar's rule ``root``.

    Raises:
        ConstraintError: it is not GBNF, or not supported, with the place.
    """
    _refuse_deep(text, limits)
    try:
        tree = _parser().parse(text)
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


def load_notation() -> None:
    """Build the parser now rather than with the first grammar."""
    _parser()


@cache
def _parser() -> Lark:
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
        least, most = simple[times.type] if times.type in simple else _times(times)
        return repeat(part, least, most)

    def nothing(self) -> Node:
        return EMPTY_TEXT

    def group(self, choices: Node) -> Node:
        return choices

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
    items: list[Any] = []  # code points, and dashes that are not escaped
    for piece in re.findall(r"\\x[0-9A-Fa-f]+|\\u.{0,4}|\\U.{0,8}|\\.|[^\\]", text, re.DOTALL):
        if piece in ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S"):
            raise _error(token, f"{token}: {piece} is not supported in GBNF; write the characters")
        items.append(piece if piece == "-" else _codes(token, piece, CLASS_LETTERS)[0])
    ranges, place = [], 0
    codes = [ord(item) if item == "-" else item for item in items]
    while place < len(items):
        first = last = codes[place]
        if items[place + 1 : place + 2] == ["-"] and place + 2 < len(items):
            last = codes[place + 2]
            place += 2
        if last < first:
            raise _error(token, f"{token}: the lower bound is above the upper one")
        ranges.append((first, last))
        place += 1
    return ranges
