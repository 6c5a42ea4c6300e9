"""The state of reading conditions: facts so far, conditions ahead, and choices ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from canvas_grammar.grammar.json.assertions import Words
from canvas_grammar.grammar.json.facts import Facts, Trace
from canvas_grammar.grammar.json.negation import Option, changed
from canvas_grammar.grammar.json.parts import Literal, Part


@dataclass(frozen=True)
class Choice:
    """At least one of some options holds.

    Attributes:
        options: the options.
        trace: how the part was reached.
        part: the part that makes the choice.
        unsaid: keywords of options that cannot be expressed.
        denied: whether the choice says that the part does not hold.
        condition: of an ``if``, whose first option is that it holds, and the second the opposite.
    """

    options: list[Option]
    trace: Trace | None
    part: Part
    unsaid: tuple[str, ...] = ()
    denied: bool = False
    condition: Literal | None = None

    @property
    def rank(self) -> int:
        """Choices of the lowest rank come first: those that say most about the value."""
        return 2 if self.denied else 1 if self.condition is not None else 0

    def only(self, n: int) -> Choice:
        """The n-th option alone."""
        return replace(self, options=[self.options[n]], condition=None)

    def split(self, facts: Facts) -> Choice | None:
        """Of an ``if``, whether a property that it speaks of is there, where that is open."""
        if self.condition is None or facts.kind != "object":
            return None
        for name in self.condition.part.keywords.get("properties", ()):
            if name not in facts.required and name not in facts.absent:
                there = changed(Facts.require, name)
                missing = changed(Facts.lack, name)
                return Choice([there, missing], self.trace, self.part)
        return None


@dataclass
class State:
    """A way through the choices.

    Attributes:
        facts: what holds.
        todo: conditions that are not read yet, and how each was reached.
        choices: choices that are not made yet.
        seen: conditions that were read.
        last: the part that made the last choice.
    """

    facts: Facts
    todo: list[tuple[Literal, Trace | None]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    seen: set[Literal] = field(default_factory=set)
    last: Part | None = None

    @classmethod
    def of(cls, facts: Facts, literals: Iterable[Literal]) -> State:
        """Some facts, and conditions that are still to be read."""
        return cls(facts, [(literal, None) for literal in literals])

    def copy(self) -> State:
        """A state of its own."""
        return State(
            self.facts.copy(), list(self.todo), list(self.choices), set(self.seen), self.last
        )

    def take(self, option: Option, choice: Choice) -> None:
        """Choose an option."""
        self.last = choice.part
        self.todo += ((literal, choice.trace) for literal in option.literals)
        if option.change is not None:
            trace = choice.trace or Trace(choice.part, None, False)
            option.change(self.facts, trace)


def choices_of(facts: Facts, words: Words, trace: Trace) -> Iterator[Choice]:
    """The choices that a part which holds leaves open."""
    part, kind = trace.part, facts.kind
    if "anyOf" in words:
        inside = [Literal(part.child("anyOf", n)) for n in range(len(words["anyOf"]))]
        # An option that always holds leaves no choice, but the others may evaluate something.
        if facts.leftover or not any(literal.certain for literal in inside):
            yield Choice([Option((one,)) for one in inside if one.part.allows(kind)], trace, part)
    if "oneOf" in words:
        inside = [Literal(part.child("oneOf", n)) for n in range(len(words["oneOf"]))]
        inside = [literal for literal in inside if literal.part.allows(kind)]
        options = [
            Option((one, *(other.opposite for other in inside if other is not one)))
            for one in inside
        ]
        yield Choice(options, trace, part)
    if "if" in words and ("then" in words or "else" in words):
        condition = Literal(part.child("if"))
        then = (Literal(part.child("then")),) if "then" in words else ()
        other = (Literal(part.child("else")),) if "else" in words else ()
        yield Choice(
            [Option((condition, *then)), Option((condition.opposite, *other))],
            trace,
            part,
            condition=condition,
        )
    if kind == "object":
        yield from _dependencies(words, trace)


def _dependencies(words: Words, trace: Trace) -> Iterator[Choice]:
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in words.get(keyword, {}).items():
            missing = changed(Facts.lack, name)
            if isinstance(needed, list):
                there = changed(Facts.require, name, *needed)
            else:
                inside = Literal(trace.part.child(keyword, name))
                there = Option((inside,), changed(Facts.require, name).change)
            yield Choice([there, missing], trace, trace.part)
