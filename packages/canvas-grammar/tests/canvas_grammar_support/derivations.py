"""Languages without automata: which texts a tree derives, and random ones that it does.

What is compiled must agree with this. It is slow, and as simple as it can be. A mark is a surrogate
in the texts here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from canvas_grammar.grammar.language import Chain, Chars, Either, Node, Repeat
from canvas_grammar.grammar.marks import Mark
from canvas_grammar.grammar.rules import Automaton, Both, Call, Rule, Without, WithoutFirst

FIRST_MARK = 0xD800
NEVER = 10**6


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


def drawn(node: Node, count: int, seed: int = 0, budget: int = 12) -> list[str]:
    """Random texts of a language, short where it can be, from all branches; at most `count`.

    Beyond `budget` calls of rules a text takes the way that nests least. Of marks, only those that
    stand alone are drawn: free text is without any.
    """
    sampler = _Sampler(node, Random(seed))
    texts = (sampler.text(node, budget) for _ in range(count))
    return [text for text in texts if text is not None]


class _Sampler:
    def __init__(self, node: Node, random: Random) -> None:
        self.random, self.left = random, 0
        rules: dict[int, Rule] = {}
        ahead, seen = [node], set[int]()
        while ahead:
            node = ahead.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            ahead += node.inside()
            if isinstance(node, Call) and id(node.rule) not in rules:
                rules[id(node.rule)] = node.rule
                ahead.append(node.rule.body)
        self.depths = dict.fromkeys(rules, NEVER)
        before: dict[int, int] = {}
        while before != self.depths:
            before = dict(self.depths)
            self.known: dict[int, int] = {}
            for name, rule in rules.items():
                self.depths[name] = min(self.depths[name], self.depth(rule.body) + 1)
        self.known = {}

    def depth(self, node: Node) -> int:
        """How deep the calls are nested at least."""
        if id(node) not in self.known:
            self.known[id(node)] = self._depth(node)
        return self.known[id(node)]

    def _depth(self, node: Node) -> int:
        if node.empty:
            return NEVER
        if isinstance(node, Call):
            return self.depths[id(node.rule)]
        if isinstance(node, Chain):
            return max(map(self.depth, node.parts), default=0)
        if isinstance(node, Either):
            return min(map(self.depth, node.options), default=NEVER)
        if isinstance(node, Repeat):
            return self.depth(node.part) if node.least else 0
        if isinstance(node, WithoutFirst):
            # At least one item, also where none of them must be there.
            parts = _parts(node)
            if not all(isinstance(part, Repeat) and part.least == 0 for part in parts):
                return self.depth(node.rest)
            return min((self.depth(part.part) for part in parts), default=NEVER)  # type: ignore[attr-defined]
        return 0

    def text(self, node: Node, budget: int) -> str | None:
        """A text, or None where none was found."""
        self.left = budget
        return self._text(node)

    def _text(self, node: Node) -> str | None:
        if node.empty:
            return None
        if isinstance(node, Mark):
            return marked(node.first) if node.first == node.last else None
        if isinstance(node, Chars):
            first, last = self.random.choice(node.ranges[:20])
            return chr(self.random.randint(first, min(last, first + 90)))
        if isinstance(node, Chain):
            return self._joined(node.parts)
        if isinstance(node, Either):
            options = self.random.sample(node.options, len(node.options))
            if self.left <= 0:
                options.sort(key=self.depth)
            texts = (self._text(option) for option in options)
            return next((text for text in texts if text is not None), None)
        if isinstance(node, Repeat):
            return self._repeated(node)
        if isinstance(node, Automaton):
            return self._run(node)
        if isinstance(node, Call):
            self.left -= 1
            return self._text(node.rule.body)
        if isinstance(node, WithoutFirst):
            return self._without_first(node)
        assert isinstance(node, Both | Without)
        inside = (self._text(node.left) for _ in range(30))
        return next((text for text in inside if text is not None and derives(node, text)), None)

    def _run(self, node: Automaton) -> str:
        text, state = "", 0
        while not node.accepting[state] or (node.moves[state] and self.random.random() < 0.9):
            char, state = self.random.choice(list(node.moves[state].items()))
            text += char
        return text

    def _repeated(self, node: Repeat) -> str | None:
        more = 0
        most = 3 if node.most is None else min(node.most - node.least, 3)
        if self.left > 0 or isinstance(node.part, Chars):
            more = self.random.choice([0, *range(most + 1)])
        parts: list[str] = []
        for n in range(node.least + more):
            text = self._text(node.part)
            if text is None:
                return "".join(parts) if n >= node.least else None
            parts.append(text)
        return "".join(parts)

    def _without_first(self, node: WithoutFirst) -> str | None:
        texts = (self._text(node.rest) for _ in range(12 if self.left > 0 else 0))
        for text in texts:
            if text is not None and text.startswith(node.first):
                return text[len(node.first) :]
        # Rarely a list of optional items is empty as often as that: take one of them.
        parts = _parts(node)
        optional = [part for part in parts if isinstance(part, Repeat) and part.least == 0]
        for one in sorted(optional, key=lambda part: self.depth(part.part)):
            rest = [part for part in parts if part is one or part not in optional]
            text = self._joined([one.part if part is one else part for part in rest])
            if text is not None and text.startswith(node.first):
                return text[len(node.first) :]
        return None

    def _joined(self, parts: Sequence[Node]) -> str | None:
        texts = []
        for part in parts:
            text = self._text(part)
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)


def _parts(node: WithoutFirst) -> Sequence[Node]:
    return node.rest.parts if isinstance(node.rest, Chain) else (node.rest,)
