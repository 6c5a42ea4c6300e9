"""Languages without automata: which texts a tree derives, and random ones that it does.

What is compiled must agree with this. It is slow, and as simple as it can be. A mark is a surrogate
in the texts here.
"""

from __future__ import annotations

from random import Random

from canvas_grammar.grammar.language import Chain, Chars, Either, Node, Repeat
from canvas_grammar.grammar.marks import Mark
from canvas_grammar.grammar.rules import Automaton, Both, Call, Without, WithoutFirst

FIRST_MARK = 0xD800


def marked(number: int) -> str:
    """The mark of a number."""
    return chr(FIRST_MARK + number)


def derives(node: Node, text: str) -> bool:
    """Whether a text belongs to a language."""
    return len(text) in _Reader(text).ends(node, 0)


class _Reader:
    """Where the texts of a language may end in `text`, by where they begin."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known: dict[tuple[int, int], frozenset[int]] = {}
        self.kept: list[Node] = []  # nodes are known by `id()`, so they must live on

    def ends(self, node: Node, begin: int) -> frozenset[int]:
        key = (id(node.rule) if isinstance(node, Call) else id(node), begin)
        if key not in self.known:
            self.known[key] = frozenset()  # a call that begins with itself adds nothing
            self.kept.append(node)
            self.known[key] = frozenset(self._ends(node, begin))
        return self.known[key]

    def _ends(self, node: Node, begin: int) -> set[int] | frozenset[int]:
        if isinstance(node, Chars):
            if begin == len(self.text):
                return set()
            code = ord(self.text[begin])
            return {begin + 1} if any(a <= code <= b for a, b in node.ranges) else set()
        if isinstance(node, Mark):
            mark = ord(self.text[begin]) - FIRST_MARK if begin < len(self.text) else -1
            return {begin + 1} if node.first <= mark <= node.last else set()
        if isinstance(node, Chain):
            places = frozenset([begin])
            for part in node.parts:
                places = self._after(part, places)
            return places
        if isinstance(node, Either):
            return frozenset().union(*(self.ends(option, begin) for option in node.options))
        if isinstance(node, Repeat):
            return self._repeated(node, begin)
        if isinstance(node, Automaton):
            return self._run(node, begin)
        if isinstance(node, Call):
            return self.ends(node.rule.body, begin)
        if isinstance(node, Both):
            return self.ends(node.left, begin) & self.ends(node.right, begin)
        if isinstance(node, Without):
            return self.ends(node.left, begin) - self.ends(node.right, begin)
        assert isinstance(node, WithoutFirst)
        whole = _Reader(node.first + self.text[begin:])
        shift = begin - len(node.first)
        return {end + shift for end in whole.ends(node.rest, 0) if end >= len(node.first)}

    def _after(self, part: Node, places: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self.ends(part, place) for place in places))

    def _run(self, node: Automaton, begin: int) -> set[int]:
        found, state, place = set(), 0, begin
        while True:
            if node.accepting[state]:
                found.add(place)
            if place == len(self.text) or self.text[place] not in node.moves[state]:
                return found
            state, place = node.moves[state][self.text[place]], place + 1

    def _repeated(self, node: Repeat, begin: int) -> set[int]:
        places, found, times = frozenset([begin]), set(), 0
        while places and (node.most is None or times <= node.most):
            if times >= node.least:
                if places <= found:
                    break
                found |= places
            places, times = self._after(node.part, places), times + 1
            if times > node.least + len(self.text) + 1:
                break
        return found


def random_text(node: Node, random: Random, depth: int = 6) -> str | None:
    """A text of a language, or None where none was found; `depth` bounds nested calls.

    Of marks, only those that stand alone are drawn: free text is without any.
    """
    if node.empty or depth < 0:
        return None
    if isinstance(node, Mark):
        return marked(node.first) if node.first == node.last else None
    if isinstance(node, Chars):
        first, last = random.choice(node.ranges[:20])
        return chr(random.randint(first, min(last, first + 90)))
    if isinstance(node, Chain):
        texts = [random_text(part, random, depth) for part in node.parts]
        return None if None in texts else "".join(texts)  # type: ignore[arg-type]
    if isinstance(node, Either):
        for option in random.sample(node.options, len(node.options)):
            if (text := random_text(option, random, depth)) is not None:
                return text
        return None
    if isinstance(node, Repeat):
        most = node.least + 3 if node.most is None else min(node.most, node.least + 3)
        count = random.randint(node.least, most)
        texts = [random_text(node.part, random, depth) for _ in range(count)]
        if None in texts:
            return "" if node.least == 0 else None
        return "".join(texts)  # type: ignore[arg-type]
    if isinstance(node, Automaton):
        return _random_run(node, random)
    if isinstance(node, Call):
        return random_text(node.rule.body, random, depth - 1)
    if isinstance(node, WithoutFirst):
        tries = (random_text(node.rest, random, depth) for _ in range(30))
        found = (t[len(node.first) :] for t in tries if t is not None and t.startswith(node.first))
        return next(found, None)
    assert isinstance(node, Both | Without)
    inside = (random_text(node.left, random, depth) for _ in range(300))
    return next((text for text in inside if text is not None and derives(node, text)), None)


def _random_run(node: Automaton, random: Random) -> str:
    text, state = "", 0
    while not node.accepting[state] or (node.moves[state] and random.random() < 0.9):
        char, state = random.choice(list(node.moves[state].items()))
        text += char
    return text
