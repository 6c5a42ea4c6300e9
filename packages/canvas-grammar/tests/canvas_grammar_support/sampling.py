"""Random texts of large languages: short where it can be, from all branches."""

from __future__ import annotations

from random import Random

from canvas_grammar.grammar.language import Chain, Chars, Either, Node, Repeat
from canvas_grammar.grammar.rules import Both, Call, Rule, Without, WithoutFirst

from canvas_grammar_support.derivations import derives, random_text

NEVER = 10**6


class Sampler:
    """Draws texts of one language.

    Beyond `budget` calls of rules it takes the way that nests least. It draws what `WithoutFirst`
    allows without trying: the first comma of a list is where its first item is.
    """

    def __init__(self, node: Node, random: Random, budget: int = 30) -> None:
        self.node, self.random, self.budget = node, random, budget
        self.left = 0
        self.rules: dict[int, Rule] = {}
        self._collect(node, set())
        self.depths = dict.fromkeys(self.rules, NEVER)
        changed = True
        while changed:
            changed = False
            self._depth_of: dict[int, int] = {}
            for name, rule in self.rules.items():
                depth = self.depth(rule.body) + 1
                if depth < self.depths[name]:
                    self.depths[name], changed = depth, True
        self._depth_of = {}

    def text(self) -> str | None:
        """A text, or None where none was found."""
        self.left = self.budget
        return self._text(self.node)

    def _collect(self, node: Node, seen: set[int]) -> None:
        ahead = [node]
        while ahead:
            node = ahead.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            ahead += node.inside()
            if isinstance(node, Call) and id(node.rule) not in self.rules:
                self.rules[id(node.rule)] = node.rule
                ahead.append(node.rule.body)

    def depth(self, node: Node) -> int:
        """How deep the calls are nested at least."""
        if id(node) not in self._depth_of:
            self._depth_of[id(node)] = self._depth(node)
        return self._depth_of[id(node)]

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
            parts = node.rest.parts if isinstance(node.rest, Chain) else (node.rest,)
            items = [p.part for p in parts if isinstance(p, Repeat) and p.least == 0]
            if len(items) < len(parts):
                return self.depth(node.rest)
            return min(map(self.depth, items), default=NEVER)
        return 0

    def _text(self, node: Node) -> str | None:
        if node.empty:
            return None
        if isinstance(node, Chain):
            return self._joined(list(node.parts))
        if isinstance(node, Either):
            options = list(node.options)
            self.random.shuffle(options)
            if self.left <= 0:
                options.sort(key=self.depth)
            texts = (self._text(option) for option in options)
            return next((text for text in texts if text is not None), None)
        if isinstance(node, Repeat):
            return self._repeated(node)
        if isinstance(node, Call):
            self.left -= 1
            return self._text(node.rule.body)
        if isinstance(node, WithoutFirst):
            return self._without_first(node)
        if isinstance(node, Both | Without):
            inside = (random_text(node.left, self.random) for _ in range(60))
            return next((t for t in inside if t is not None and derives(node, t)), None)
        return random_text(node, self.random)

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
        for _ in range(12 if self.left > 0 else 0):
            text = self._text(node.rest)
            if text is not None and text.startswith(node.first):
                return text[len(node.first) :]
        # Rarely a list of optional items is empty as often as that: take one of them.
        parts = list(node.rest.parts) if isinstance(node.rest, Chain) else [node.rest]
        items = [n for n, p in enumerate(parts) if isinstance(p, Repeat) and p.least == 0]
        items.sort(key=lambda n: self.depth(parts[n].part))  # type: ignore[attr-defined]
        for n in items:
            part = parts[n]
            assert isinstance(part, Repeat)
            rest = [p for m, p in enumerate(parts) if m == n or m not in items]
            rest = [p.part if p is part else p for p in rest]  # type: ignore[attr-defined]
            text = self._joined(rest)
            if text is not None and text.startswith(node.first):
                return text[len(node.first) :]
        return None

    def _joined(self, parts: list[Node]) -> str | None:
        texts = []
        for part in parts:
            text = self._text(part)
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)
