"""From conditions on a value to alternatives, each of them facts that hold together.

Choices (``anyOf``, ``oneOf``, ``if``, dependencies, whatever a negation leaves open) are made one
after another. Alternatives that contradict themselves are dropped as soon as that shows.

There are two readings. What is offered is read so that every value surely meets the conditions.
To prove that no value meets some conditions, they are read so that no value that may meet them is
left out (`over`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from canvas_grammar.grammar.json.assertions import assert_keywords
from canvas_grammar.grammar.json.choices import Choice, State, choices_of
from canvas_grammar.grammar.json.constants import identity, kind_of
from canvas_grammar.grammar.json.facts import Facts, Trace, fits_number, fits_string
from canvas_grammar.grammar.json.leftovers import settle_leftovers, some_choice
from canvas_grammar.grammar.json.negation import Option, violations
from canvas_grammar.grammar.json.parts import Literal, Part
from canvas_grammar.grammar.json.references import Document, circular
from canvas_grammar.grammar.json.shapes import KINDS, REFERENCES
from canvas_grammar.limits import ConstraintError

MOST_ALTERNATIVES = 512
MOST_STATES = 4096
MOST_STATES_OF_A_PROOF = 64
DEPTH_OF_A_PROOF = 2


class Expansion:
    """Reads conditions of one document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.left_out: dict[Part, tuple[str, ...]] = {}
        self._possible: dict[tuple[frozenset[Literal], int], bool] = {}
        self._admits: dict[tuple[frozenset[Literal], str, bool], list[Facts]] = {}

    def kinds(self, literals: Iterable[Literal]) -> list[str]:
        """The types that values may have, as far as that is plain."""
        kinds = list(KINDS)
        for part, negated in literals:
            if not negated:
                kinds = [kind for kind in kinds if part.allows(kind)]
        return kinds

    def alternatives(self, kind: str, literals: Iterable[Literal]) -> list[Facts]:
        """Alternatives of values of one type, each of which meets all conditions.

        Raises:
            ConstraintError: there are too many, or a condition cannot be expressed.
        """
        found: dict[object, Facts] = {}
        state = State.of(Facts(kind), literals)
        for facts in self._states(state, False, DEPTH_OF_A_PROOF):
            found.setdefault(facts.key(), facts)
            if len(found) > MOST_ALTERNATIVES:
                raise ConstraintError(
                    "anyOf, oneOf, if, not and dependencies make more than "
                    f"{MOST_ALTERNATIVES} alternatives"
                )
        return list(found.values())

    def possible(self, literals: tuple[Literal, ...], depth: int = DEPTH_OF_A_PROOF) -> bool:
        """Whether any value may meet some conditions; in doubt, the answer is yes."""
        if not literals:
            return True
        key = (frozenset(literals), depth)
        if key not in self._possible:
            self._possible[key] = True  # until the opposite is known
            self._possible[key] = any(
                self._may_be(kind, literals, depth) for kind in self.kinds(literals)
            )
        return self._possible[key]

    def impossible_part(self, literals: tuple[Literal, ...]) -> tuple[Literal, ...] | None:
        """Conditions on a demanded property or item that no value meets, if there are such."""
        for kind in self.kinds(literals):
            state = State.of(Facts(kind), literals)
            for facts in self._states(state, True, depth=0):
                parts = [facts.of_property(name, True) for name in facts.required]
                parts += [facts.of_item(n) for n in range(min(facts.least, facts.leading + 1))]
                for part in parts:
                    if not self.possible(part):
                        return part
        return None

    def _may_be(self, kind: str, literals: tuple[Literal, ...], depth: int) -> bool:
        state = State.of(Facts(kind), literals)
        return any(True for _ in self._states(state, True, depth))

    def apart(self, facts: Facts, literal: Literal) -> bool:
        """Whether it is certain that no value that meets the facts meets a condition."""
        state = State.of(facts.copy(), [literal])
        return not any(True for _ in self._states(state, True, DEPTH_OF_A_PROOF))

    def admits(self, literals: tuple[Literal, ...], value: object, over: bool = False) -> bool:
        """Whether a value surely meets conditions; with `over`, whether it may meet them."""
        kind = kind_of(value)
        key = (frozenset(literals), kind, over)
        if key not in self._admits:
            state = State.of(Facts(kind), literals)
            self._admits[key] = list(self._states(state, over, DEPTH_OF_A_PROOF))
        return any(self.fits(facts, value, over) for facts in self._admits[key])

    def _states(self, state: State, over: bool, depth: int) -> Iterator[Facts]:
        """The facts of all alternatives; a proof that takes too long yields what it has."""
        stack, made = [state], 0
        while stack:
            state = stack.pop()
            made += 1
            if made > (MOST_STATES_OF_A_PROOF if over else MOST_STATES):
                if over:
                    yield state.facts
                    return
                where = state.last.complain if state.last else ConstraintError
                raise where("this and what is around it make too many alternatives")
            self._settle(state, over)
            if state.facts.dead or not self._consistent(state.facts, over, depth):
                continue
            choice = self._next(state, over)
            if choice is None:
                yield state.facts
                continue
            if choice.unsaid and over:
                stack.append(state.copy())
            elif choice.unsaid:
                self.left_out.setdefault(choice.part, choice.unsaid)
            for option in reversed(choice.options):
                new = state.copy()
                new.take(option, choice)
                stack.append(new)

    def _settle(self, state: State, over: bool) -> None:
        """Add to the facts whatever leaves no choice."""
        while state.todo and not state.facts.dead:
            literal, above = state.todo.pop(0)
            if literal.hopeless:
                state.facts.dead = True
            elif not literal.certain:
                self._check_circular(literal, above)
                if literal in state.seen:
                    continue
                state.seen.add(literal)
                part, negated = literal
                trace = Trace(part, above, not negated and (above is None or above.counts))
                if negated:
                    self._deny(state, trace, over)
                else:
                    self._assert(state, trace, over)

    def _check_circular(self, literal: Literal, above: Trace | None) -> None:
        trace = above
        while trace is not None and above is not None:
            if trace.part is literal.part:
                words = above.part.keywords
                raise circular(above.part, next((k for k in REFERENCES if k in words), ""))
            trace = trace.above

    def _assert(self, state: State, trace: Trace, over: bool) -> None:
        part = trace.part
        words = part.certain if over else part.keywords
        assert_keywords(state.facts, words, trace, over)
        for keyword in REFERENCES:
            if keyword in words:
                state.todo.append((Literal(self.document.target(part, keyword)), trace))
        for n in range(len(words.get("allOf", ()))):
            state.todo.append((Literal(part.child("allOf", n)), trace))
        if "not" in words:
            state.todo.append((Literal(part.child("not"), True), trace))
        state.choices += choices_of(state.facts, words, trace)

    def _deny(self, state: State, trace: Trace, over: bool) -> None:
        part, kind = trace.part, state.facts.kind
        words = part.keywords if over else part.certain
        if not part.allows(kind):
            return
        options, unsaid = violations(part, words, kind)
        for keyword in REFERENCES:
            if keyword in words:
                options.append(Option((Literal(self.document.target(part, keyword), True),)))
        if len(options) == 1 and not unsaid:
            state.take(options[0], Choice([], trace, part))
        else:
            state.choices.append(Choice(options, trace, part, tuple(unsaid), denied=True))

    def _next(self, state: State, over: bool) -> Choice | None:
        """The next choice that is a choice; conditions that hold anyway are passed."""
        while state.choices:
            n = min(range(len(state.choices)), key=lambda n: state.choices[n].rank)
            choice = state.choices.pop(n)
            if not over and choice.denied and self.apart(state.facts, Literal(choice.part)):
                continue
            if choice.condition is not None and not over:
                if self.apart(state.facts, choice.condition):
                    return choice.only(1)
                if self.apart(state.facts, choice.condition.opposite):
                    return choice.only(0)
                split = choice.split(state.facts)
                if split is not None:
                    state.choices.append(choice)
                    return split
            return choice
        facts = state.facts
        if facts.leftover and not over:  # in a proof, more may be evaluated later
            settle_leftovers(facts)
        if facts.some:
            return some_choice(self, facts, over)
        return None

    def _consistent(self, facts: Facts, over: bool, depth: int) -> bool:
        """Whether nothing shows that no value is left."""
        if facts.values is not None:
            left = [v for v in facts.values.values() if self.fits(facts, v, True, depth)]
            facts.only(left)
            return not facts.dead
        if depth <= 0:
            return True
        if facts.kind == "object":
            for name in facts.required:
                if not self.possible(facts.of_property(name, True), depth - 1):
                    return False
        elif facts.kind == "array":
            for n in range(min(facts.least, facts.leading + 1)):
                if not self.possible(facts.of_item(n), depth - 1):
                    return False
        return True

    def fits(self, facts: Facts, value: object, over: bool, depth: int = DEPTH_OF_A_PROOF) -> bool:
        """Whether a value of the right type surely meets facts; with `over`, whether it may."""
        name = identity(value)
        if name in facts.barred or (facts.values is not None and name not in facts.values):
            return False
        if isinstance(value, str):
            verdict = fits_string(facts.string, value)
            return over if verdict is None else verdict
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, int | float):
            return fits_number(facts.number, value)
        if not facts.least <= len(value) <= (len(value) if facts.most is None else facts.most):  # type: ignore[arg-type]
            return False
        if isinstance(value, dict):
            return self._fits_object(facts, value, over)
        return self._fits_array(facts, value, over)  # type: ignore[arg-type]

    def _fits_object(self, facts: Facts, value: dict[str, object], over: bool) -> bool:
        if not facts.required.keys() <= value.keys() or not facts.absent.isdisjoint(value):
            return False
        if (facts.some or facts.leftover) and not over:
            return False
        return all(
            self.admits(facts.of_property(name, over), inside, over)
            and self.admits(facts.names, name, over)
            for name, inside in value.items()
        )

    def _fits_array(self, facts: Facts, value: list[object], over: bool) -> bool:
        if facts.distinct and len({identity(item) for item in value}) < len(value):
            return False
        if facts.leftover and not over:
            return False
        if not all(self.admits(facts.of_item(n), item, over) for n, item in enumerate(value)):
            return False
        for counted in facts.counted:
            sure = sum(self.admits((counted.item,), item) for item in value)
            maybe = len(value) - sum(self.admits((counted.item.opposite,), item) for item in value)
            low, high = (maybe, sure) if over else (sure, maybe)
            if low < counted.least or (counted.most is not None and high > counted.most):
                return False
        return True
