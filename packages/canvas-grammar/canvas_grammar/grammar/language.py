"""Represent regular languages as small trees, and as expressions for `outlines_core`.

Every character of an expression is given by its code point, so no detail of a user's dialect
reaches `outlines_core`. Trees share parts, which are repeated in the expression. A language
contains neither U+0000, which marks the end of a text, nor surrogates, which UTF-8 cannot encode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from canvas_grammar.limits import CompileLimits, ConstraintError

Range = tuple[int, int]
Ranges = tuple[Range, ...]

LAST = 0x10FFFF
MOST_COPIED = 256
# All characters that a text may contain.
ANY: Ranges = ((0x1, 0xD7FF), (0xE000, LAST))


@dataclass(frozen=True, eq=False)
class Node:
    """A language.

    Attributes:
        positions: byte positions with all repetitions counted.
        length: an upper bound of the length of its expression.
        empty: whether no text belongs to it, not even the empty text.
    """

    positions: int = field(init=False, default=0)
    length: int = field(init=False, default=0)
    empty: bool = field(init=False, default=False)

    _inside: tuple[Node, ...] = field(init=False, default=(), repr=False)

    def inside(self) -> tuple[Node, ...]:
        """The languages that it is made of, its children."""
        return self._inside

    def _measured(
        self, positions: int, length: int, empty: bool = False, inside: tuple[Node, ...] = ()
    ) -> None:
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "empty", empty)
        object.__setattr__(self, "_inside", inside)


@dataclass(frozen=True, eq=False)
class Chars(Node):
    """One character from `ranges`, which are sorted, disjoint, not adjacent and within `ANY`."""

    ranges: Ranges

    def __post_init__(self) -> None:
        wide = [(first, last) for first, last in self.ranges if last > 0x7F]
        # A range is a few sequences of byte ranges; short ones are short sequences.
        positions = 1 + sum(1 if last < 0x800 else 4 if last < 0x10000 else 6 for _, last in wide)
        self._measured(positions, 2 + 21 * len(self.ranges), not self.ranges)


@dataclass(frozen=True, eq=False)
class Chain(Node):
    """The concatenation of its parts; without parts, the empty text."""

    parts: tuple[Node, ...]

    def __post_init__(self) -> None:
        self._measured(
            sum(part.positions for part in self.parts),
            sum(part.length for part in self.parts),
            any(part.empty for part in self.parts),
            self.parts,
        )


@dataclass(frozen=True, eq=False)
class Either(Node):
    """The union of its options; without options, the empty language."""

    options: tuple[Node, ...]

    def __post_init__(self) -> None:
        self._measured(
            1 + sum(option.positions for option in self.options),
            4 + sum(option.length + 1 for option in self.options),
            all(option.empty for option in self.options),
            self.options,
        )


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """`least` to `most` repetitions of a part; None means any number."""

    part: Node
    least: int
    most: int | None

    def __post_init__(self) -> None:
        times = self.least + 1 if self.most is None else self.most
        self._measured(
            1 + times * self.part.positions,
            self.part.length + 24,
            self.part.empty and self.least > 0,
            (self.part,),
        )


EMPTY_TEXT = Chain(())
NOTHING = Either(())


def chars(ranges: Iterable[Range]) -> Node:
    """One character from ranges that may overlap and be in any order."""
    return Chars(intersection(union(ranges), ANY))


def literal(text: str) -> Node:
    """Exactly this text."""
    return Chain(tuple(chars([(ord(char), ord(char))]) for char in text))


def sequence(*parts: Node) -> Node:
    """The concatenation of parts."""
    if any(part.empty for part in parts):
        return NOTHING
    # Nested chains are flattened, so that a long schema is not a deep tree. Long ones are not,
    # because they may be shared and would be copied.
    flat: list[Node] = []
    for part in parts:
        if isinstance(part, Chain) and len(part.parts) <= MOST_COPIED:
            flat += part.parts
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else Chain(tuple(flat)) if flat else EMPTY_TEXT


def either(options: Iterable[Node]) -> Node:
    """The union of options, without those that are empty."""
    nonempty = tuple(option for option in options if not option.empty)
    return nonempty[0] if len(nonempty) == 1 else Either(nonempty)


def repeat(part: Node, least: int, most: int | None) -> Node:
    """`least` to `most` repetitions; of an empty part, no repetition is still possible."""
    if most is not None and most < least:
        return NOTHING
    if part.empty or most == 0:
        return EMPTY_TEXT if least == 0 else NOTHING
    return Repeat(part, least, most)


def optional(part: Node) -> Node:
    """The part or the empty text."""
    return repeat(part, 0, 1)


def union(ranges: Iterable[Range]) -> Ranges:
    """Sort ranges, and merge those that overlap or touch; empty ranges are dropped."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if last < first:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other code points of `ANY`; `ranges` must be as from `union`."""
    gaps, first_missing = [], 0
    for first, last in ranges:
        gaps.append((first_missing, first - 1))
        first_missing = last + 1
    return intersection(union([*gaps, (first_missing, LAST)]), ANY)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Code points in both; each must be as from `union`."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            common.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def as_expression(node: Node, limits: CompileLimits, symbol: Callable[[Node], str]) -> str:
    """The language as a regular expression of Rust's ``regex`` crate, if it is not too large.

    `symbol` gives the expression that stands for a node of another module, such as a call.
    """
    check_size(node, limits)
    pieces: list[str] = []
    _write(node, pieces, symbol)
    return "".join(pieces)


def check_size(node: Node, limits: CompileLimits) -> None:
    """Refuse a language whose expression would be too large."""
    for name, have, most in (
        ("byte positions", node.positions, limits.positions),
        ("characters as a regular expression", node.length, limits.expression_characters),
    ):
        if have > most:
            raise ConstraintError(
                f"the constraint is too large: {have} {name}, at most {most} are served "
                "(repetitions count in full)"
            )


def _write(node: Node, pieces: list[str], symbol: Callable[[Node], str]) -> None:
    if isinstance(node, Chars):
        pieces.append(f"[{''.join(_range(*pair) for pair in node.ranges)}]")
    elif isinstance(node, Chain):
        for part in node.parts:
            _write(part, pieces, symbol)
    elif isinstance(node, Either | Repeat):
        for n, option in enumerate(node.inside()):
            pieces.append("|" if n else "(?:")
            _write(option, pieces, symbol)
        pieces.append(")")
        if isinstance(node, Repeat):
            pieces.append(f"{{{node.least},{'' if node.most is None else node.most}}}")
    else:
        pieces.append(symbol(node))


def _range(first: int, last: int) -> str:
    return rf"\x{{{first:x}}}" if first == last else rf"\x{{{first:x}}}-\x{{{last:x}}}"
