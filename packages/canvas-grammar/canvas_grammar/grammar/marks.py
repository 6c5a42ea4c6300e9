"""Name tokens in languages: markers of tool calls and of reasoning, which no text spells.

Special tokens, and those that were added to a tokenizer, are *marks*. A mark is none of the texts
that a language is otherwise made of, so it occurs only where a language names it, and in free text.
The marks that a constraint names have numbers from 2 on. All other special tokens have the number
`OTHER`, or `NEVER` where no language of the constraint may hold them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from canvas_grammar.grammar.language import EMPTY_TEXT, Node, either, literal, repeat, sequence
from canvas_grammar.limits import ConstraintError

NEVER, OTHER, MOST = 0, 1, 0x7D
CALL, CALL_END, DELIMITER = "<|tool_call>", "<tool_call|>", '<|"|>'
# Our own field and style of schemas in structural tags: if the schema is not supported, the content
# may be any object; the content is written as the arguments of Gemma's calls.
LENIENT, GEMMA = "or_any_object", "gemma"


@dataclass(frozen=True, eq=False)
class Mark(Node):
    """One of the marks with these numbers."""

    first: int
    last: int

    def __post_init__(self) -> None:
        self._measured(3, 30)


ANY_MARK = Mark(OTHER, MOST)
OTHER_MARKS = repeat(Mark(OTHER, OTHER), 0, None)


class Marks:
    """The marks of a vocabulary, and the numbers of those that a constraint names, by token."""

    def __init__(
        self, added: Mapping[str, int] | None = None, special: Collection[str] = (),
        hides_special: bool = False,
    ) -> None:  # fmt: skip
        """Make the marks of a constraint, of which none is named yet.

        Args:
            added: from the texts of tokens that may be written to their ids.
            special: the texts of special tokens, which readers of calls may drop.
            hides_special: special tokens are left out of the text that a client gets, so that texts
                do not name them.
        """
        self.added, self.special, self.hides_special = added or {}, special, hides_special
        self.numbers: dict[int, int] = {}
        self._longest = max(map(len, self.added), default=0)

    @cached_property
    def _named(self) -> Mapping[str, int]:
        hidden = self.special if self.hides_special else ()
        return {text: token for text, token in self.added.items() if text not in hidden}

    def visible(self) -> Marks:
        """The same marks for texts that name special tokens, too."""
        every = Marks(self.added, self.special)
        every.numbers = self.numbers
        return every

    def mark(self, token: int) -> Mark:
        """The mark of a token; a constraint may name `MOST` of them."""
        number = self.numbers.get(token) or max([OTHER, *self.numbers.values()]) + 1
        if number > MOST:
            raise ConstraintError(f"the constraint names more than {MOST - OTHER} special tokens")
        self.numbers[token] = number
        return Mark(number, number)

    def written(self, text: str) -> Node:
        """A text as a model writes it: with the tokens that the vocabulary has for parts of it."""
        return sequence(
            *(self.mark(self._named[part]) if part in self._named else literal(part)
              for part in self._parts(text))
        )  # fmt: skip

    def found(self, text: str) -> Node:
        """Whatever a client sees as a text: its tokens may be spelled, and hidden ones be in it.

        A special token that may be a part of the text when it is spelled is not offered any more.
        """
        for other in self.special:
            if other in self._named and other != text and _overlap(other, text):
                self.numbers.setdefault(self._named[other], NEVER)
        gap = OTHER_MARKS if self.hides_special else EMPTY_TEXT
        nodes: list[Node] = []
        for part in self._parts(text):
            spelled = sequence(*(node for char in part for node in (literal(char), gap)))
            named = part in self._named
            nodes.append(either([spelled, self.mark(self._named[part])]) if named else spelled)
        return sequence(*nodes)

    def _parts(self, text: str) -> Iterator[str]:
        """The tokens in a text, the longest at each place, and the characters between them."""
        place = 0
        while place < len(text):
            ends = range(min(place + self._longest, len(text)), place + 1, -1)
            end = next((end for end in ends if text[place:end] in self._named), place + 1)
            yield text[place:end]
            place = end


def _overlap(one: str, other: str) -> bool:
    """Whether a text may hold the second one only because the first is a part of it."""
    return other in one or any(
        other.startswith(one[n:]) or other.endswith(one[:n]) for n in range(1, len(one))
    )
