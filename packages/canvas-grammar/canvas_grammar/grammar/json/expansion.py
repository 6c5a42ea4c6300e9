"""Expand conditions on a value into alternatives. An alternative is facts that hold together.

Choices (``anyOf``, ``oneOf``, ``if``, dependencies, whatever a negation leaves open) are made one
after another. Alternatives that contradict themselves are dropped as soon as that shows.

There are two readings. To offer values, conditions are read so that every value surely meets them.
To prove that no value meets some conditions, they are read so that no value that may meet them is
left out (`over`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from canvas_grammar.grammar.ecma import Alternatives, Characters, Repetition, Sequence, Tree, parse
from canvas_grammar.grammar.json.facts import (
    Facts,
    Layer,
    Row,
    SomeMember,
    Trace,
    Words,
    assert_keywords,
    exact,
    fits_string,
)
from canvas_grammar.grammar.json.negation import (
    Option,
    changed,
    subschema_of_anything,
    violations,
    wrong_property,
)
from canvas_grammar.grammar.json.references import Document, circular
from canvas_grammar.grammar.json.subschemas import KINDS, REFERENCES, Literal, Subschema
from canvas_grammar.grammar.json.values import found, identity, kind_of
from canvas_grammar.grammar.json_strings import StringFacts
from canvas_grammar.limits import ConstraintError, spend


@dataclass(frozen=True)
class Disjunction:
    """At least one of some options holds.

    That of an ``if`` has a condition: its first option is that it holds, the second the opposite.
    """

    options: list[Option]
    trace: Trace | None  # how the subschema was reached
    subschema: Subschema  # that it comes from
    unsaid: tuple[str, ...] = ()  # keywords of options that cannot be expressed
    denied: bool = False  # whether it says that the subschema does not hold
    condition: Literal | None = None

    @property
    def rank(self) -> int:
        """Choices of the lowest rank come first: those that say most about the value."""
        return 2 if self.denied else 1 if self.condition is not None else 0

    def only(self, n: int) -> Disjunction:
        """The n-th option alone."""
        return replace(self, options=[self.options[n]], condition=None)

    def split(self, facts: Facts) -> Disjunction | None:
        """Whether a property that an ``if`` mentions is there, if that is open."""
        if self.condition is None or facts.kind != "object":
            return None
        for name in self.condition.subschema.keywords.get("properties", ()):
            if name not in facts.required and name not in facts.absent:
                options = [changed(Facts.require, name), changed(Facts.lack, name)]
                return Disjunction(options, self.trace, self.subschema)
        return None


@dataclass
class Branch:
    """A way through the disjunctions."""

    facts: Facts
    todo: list[tuple[Literal, Trace | None]]  # conditions ahead, and how each was reached
    disjunctions: list[Disjunction] = field(default_factory=list)  # that are not made yet
    seen: set[Literal] = field(default_factory=set)  # conditions that were read
    last: Subschema | None = None  # that of the last disjunction

    def copy(self) -> Branch:
        """A copy."""
        return Branch(
            self.facts.copy(), list(self.todo), list(self.disjunctions), set(self.seen), self.last
        )

    def take(self, option: Option, disjunction: Disjunction) -> None:
        """Choose an option."""
        self.last = disjunction.subschema
        self.todo += ((literal, disjunction.trace) for literal in option.literals)
        if option.change is not None:
            trace = disjunction.trace or Trace(disjunction.subschema, None, False)
            option.change(self.facts, trace)


def disjunctions_of(facts: Facts, words: Words, trace: Trace) -> Iterator[Disjunction]:
    """The disjunctions that a subschema which holds leaves open."""
    subschema, kind = trace.subschema, facts.kind
    if "anyOf" in words:
        inside = [Literal(subschema.child("anyOf", n)) for n in range(len(words["anyOf"]))]
        # An option that always holds leaves no choice, but the others may evaluate something.
        if facts.leftover or not any(literal.certain for literal in inside):
            yield Disjunction(
                [Option((one,)) for one in inside if one.subschema.allows(kind)], trace, subschema
            )
    if "oneOf" in words:
        inside = [Literal(subschema.child("oneOf", n)) for n in range(len(words["oneOf"]))]
        inside = [literal for literal in inside if literal.subschema.allows(kind)]
        options = [
            Option((one, *(other.opposite for other in inside if other is not one)))
            for one in inside
        ]
        yield Disjunction(options, trace, subschema)
    if "if" in words and ("then" in words or "else" in words):
        condition = Literal(subschema.child("if"))
        then = (Literal(subschema.child("then")),) if "then" in words else ()
        other = (Literal(subschema.child("else")),) if "else" in words else ()
        options = [Option((condition, *then)), Option((condition.opposite, *other))]
        yield Disjunction(options, trace, subschema, condition=condition)
    if kind == "object":
        yield from _dependencies(words, trace)


def _dependencies(words: Words, trace: Trace) -> Iterator[Disjunction]:
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in words.get(keyword, {}).items():
            missing = changed(Facts.lack, name)
            if isinstance(needed, list):
                there = changed(Facts.require, name, *needed)
            else:
                inside = Literal(trace.subschema.child(keyword, name))
                there = Option((inside,), changed(Facts.require, name).change)
            yield Disjunction([there, missing], trace, trace.subschema)


# ---- Names for required properties that no schema names.

COMMON = ("a", "b", "c", "x", "0", "1", "", "aa", "aaaa", "aaaaaaaaaaaa")
MOST_PATTERNS = 8
LONGEST = 64


def suggested_names(conditions: Iterable[StringFacts], patterns: Iterable[str]) -> Iterator[str]:
    """Texts that may meet one of some conditions, and match patterns; the caller has to try."""
    known = dict.fromkeys(p for facts in conditions for p in facts.patterns)
    examples = []
    for pattern in list(known | dict.fromkeys(patterns))[:MOST_PATTERNS]:
        try:
            example = _example(parse(pattern))
        except ConstraintError:
            continue
        if len(example) <= LONGEST:
            examples.append(example)
    yield from dict.fromkeys((*examples, *map("".join, combinations(examples, 2)), *COMMON))


def _example(tree: Tree) -> str:
    """A short text that the tree matches, apart from its assertions."""
    if isinstance(tree, Characters):
        readable = (chr(first) for first, last in tree.sure if first > 0x20)
        liked = (char for char in "a0A_" if any(f <= ord(char) <= t for f, t in tree.sure))
        return next(liked, None) or next(readable, "")
    if isinstance(tree, Sequence):
        return "".join(map(_example, tree.items))
    if isinstance(tree, Alternatives):
        return _example(tree.options[0])
    if isinstance(tree, Repetition):
        return _example(tree.item) * min(tree.least, LONGEST)
    return ""


# ---- The last steps: properties and items that nothing evaluates, and properties to be found.

MOST_MADE_UP = 3  # names for one property
MOST_SUGGESTED = 16


def settle_leftovers(facts: Facts) -> None:
    """Turn ``unevaluatedProperties`` and ``unevaluatedItems`` into layers and rows.

    Properties and items that only other alternatives would evaluate count as not evaluated. That
    leaves out some values.
    """
    for literal, where in facts.leftover:
        anything = Literal(subschema_of_anything(where.subschema))
        if facts.kind == "object":
            layers = [layer for layer, trace in facts.layers if trace.begins_with(where)]
            if any(layer.additional is not None for layer in layers):
                continue
            names = {name: anything for layer in layers for name in layer.properties}
            patterns = {pattern: anything for layer in layers for pattern in layer.patterns}
            facts.layers += ((Layer(names, patterns, literal), where),)
        else:
            rows = [row for row, trace in facts.rows if trace.begins_with(where)]
            if any(row.rest is not None for row in rows):
                continue
            first = max((len(row.first) for row in rows), default=0)
            facts.rows += ((Row((anything,) * first, literal), where),)
    facts.leftover = ()


def some_property(expansion: Expansion, facts: Facts, over: bool) -> Disjunction:
    """The choice of a property that there must be; `facts` lose the condition.

    Properties that a schema names are tried. If none of these will do, so are a few names that are
    made up here. A property with another name is not offered.
    """
    member, facts.some = facts.some[0], facts.some[1:]
    subschema = (member.value or member.naming or facts.names[0]).subschema
    trace = Trace(subschema, None, False)
    known = facts.known_names()
    names = [name for name in known if _is_meant(expansion, facts, member, name)]
    closed = any(
        layer.additional is not None and layer.additional.hopeless and not layer.patterns
        for layer, _ in facts.layers
    )
    if not over and not closed and (not names or facts.least > len(facts.required)):
        others = (name for name in _suggested(expansion, facts, member) if name not in known)
        names += islice((n for n in others if _is_meant(expansion, facts, member, n)), MOST_MADE_UP)
    options = [
        changed(Facts.require, name)
        if member.value is None
        else Option((), wrong_property(name, member.value))
        for name in names
    ]
    return Disjunction(
        options, trace, subschema, () if closed else ("a property that no schema names",)
    )


def _suggested(expansion: Expansion, facts: Facts, member: SomeMember) -> Iterator[str]:
    """Names that may do."""
    conditions = facts.names if member.naming is None else (*facts.names, member.naming)
    naming = expansion.alternatives("string", conditions) if conditions else []
    for one in naming:
        yield from islice((one.values or {}).values(), MOST_SUGGESTED)
    patterns = [pattern for layer, _ in facts.layers for pattern in layer.patterns]
    wanted = [member.matching] if member.matching is not None else []
    yield from suggested_names([one.string for one in naming], [*wanted, *patterns])


def _is_meant(expansion: Expansion, facts: Facts, member: SomeMember, name: str) -> bool:
    if name in facts.absent:
        return False
    if facts.names and name not in facts.required and not expansion.admits(facts.names, name):
        return False
    if member.naming is not None and not expansion.admits((member.naming,), name):
        return False
    if name in member.apart_from or any(found(p, name) is not False for p in member.unlike):
        return False
    return member.matching is None or found(member.matching, name) is True


def _demanded(facts: Facts) -> Iterator[tuple[Literal, ...]]:
    """The conditions on properties and items that must be there."""
    if facts.kind == "object":
        yield from (facts.of_property(name, True) for name in facts.required)
    elif facts.kind == "array":
        yield from (facts.of_item(n) for n in range(min(facts.least, facts.leading + 1)))


MOST_ALTERNATIVES = 512
MOST_STATES = 4096
MOST_STATES_OF_A_PROOF = 64
DEPTH_OF_A_PROOF = 2


class Expansion:
    """Reads conditions of one document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.left_out: dict[Subschema, tuple[str, ...]] = {}
        self._possible: dict[tuple[frozenset[Literal], int], bool] = {}
        self._admits: dict[tuple[frozenset[Literal], str, bool], list[Facts]] = {}

    def kinds(self, literals: Iterable[Literal]) -> list[str]:
        """The types that values may have, as far as they are clear."""
        kinds = list(KINDS)
        for subschema, negated in literals:
            if not negated:
                kinds = [kind for kind in kinds if subschema.allows(kind)]
        return kinds

    def alternatives(self, kind: str, literals: Iterable[Literal]) -> list[Facts]:
        """The ways in which values of one type meet all conditions; too many are refused."""
        found: dict[object, Facts] = {}
        for facts in self._branches(Facts(kind), literals, over=False):
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
                True
                for kind in self.kinds(literals)
                for _ in self._branches(Facts(kind), literals, True, depth)
            )
        return self._possible[key]

    def impossible_part(self, literals: tuple[Literal, ...]) -> tuple[Literal, ...] | None:
        """Conditions on a demanded property or item that no value meets, if there are such."""
        for kind in self.kinds(literals):
            for facts in self._branches(Facts(kind), literals, True, depth=0):
                for conditions in _demanded(facts):
                    if not self.possible(conditions):
                        return conditions
        return None

    def apart(self, facts: Facts, literal: Literal) -> bool:
        """Whether it is certain that no value that meets the facts meets a condition."""
        return not any(True for _ in self._branches(facts.copy(), [literal], over=True))

    def admits(self, literals: tuple[Literal, ...], value: object, over: bool = False) -> bool:
        """Whether a value surely meets conditions; with `over`, whether it may meet them."""
        kind = kind_of(value)
        key = (frozenset(literals), kind, over)
        if key not in self._admits:
            self._admits[key] = list(self._branches(Facts(kind), literals, over))
        return any(self.fits(facts, value, over) for facts in self._admits[key])

    def _branches(
        self, facts: Facts, literals: Iterable[Literal], over: bool, depth: int = DEPTH_OF_A_PROOF
    ) -> Iterator[Facts]:
        """The facts of all alternatives; a proof that takes too long yields what it has."""
        stack, made = [Branch(facts, [(literal, None) for literal in literals])], 0
        while stack:
            branch = stack.pop()
            made += 1
            spend(50)
            if made > (MOST_STATES_OF_A_PROOF if over else MOST_STATES):
                if over:
                    yield branch.facts
                    return
                where = branch.last.complain if branch.last else ConstraintError
                raise where("this and what is around it make too many alternatives")
            self._settle(branch, over)
            if branch.facts.dead or not self._consistent(branch.facts, over, depth):
                continue
            disjunction = self._next(branch, over)
            if disjunction is None:
                yield branch.facts
                continue
            if disjunction.unsaid and over:
                stack.append(branch.copy())
            elif disjunction.unsaid:
                self.left_out.setdefault(disjunction.subschema, disjunction.unsaid)
            for option in reversed(disjunction.options):
                new = branch.copy()
                new.take(option, disjunction)
                stack.append(new)

    def _settle(self, branch: Branch, over: bool) -> None:
        """Add to the facts whatever leaves no choice."""
        while branch.todo and not branch.facts.dead:
            literal, above = branch.todo.pop(0)
            subschema, negated = literal
            if literal.hopeless:
                branch.facts.dead = True
            elif not literal.certain:
                if above is not None and above.passes(subschema):
                    words = above.subschema.keywords
                    raise circular(above.subschema, next((k for k in REFERENCES if k in words), ""))
                if literal in branch.seen:
                    continue
                branch.seen.add(literal)
                trace = Trace(subschema, above, not negated and (above is None or above.counts))
                (self._deny if negated else self._assert)(branch, trace, over)

    def _assert(self, branch: Branch, trace: Trace, over: bool) -> None:
        subschema = trace.subschema
        words = subschema.certain if over else subschema.keywords
        assert_keywords(branch.facts, words, trace, over)
        for keyword in REFERENCES:
            if keyword in words:
                branch.todo.append((Literal(self.document.target(subschema, keyword)), trace))
        for n in range(len(words.get("allOf", ()))):
            branch.todo.append((Literal(subschema.child("allOf", n)), trace))
        if "not" in words:
            branch.todo.append((Literal(subschema.child("not"), True), trace))
        branch.disjunctions += disjunctions_of(branch.facts, words, trace)

    def _deny(self, branch: Branch, trace: Trace, over: bool) -> None:
        subschema, kind = trace.subschema, branch.facts.kind
        words = subschema.keywords if over else subschema.certain
        if not subschema.allows(kind):
            return
        options, unsaid = violations(subschema, words, kind)
        for keyword in REFERENCES:
            if keyword in words:
                options.append(Option((Literal(self.document.target(subschema, keyword), True),)))
        if len(options) == 1 and not unsaid:
            branch.take(options[0], Disjunction([], trace, subschema))
        else:
            branch.disjunctions.append(
                Disjunction(options, trace, subschema, tuple(unsaid), denied=True)
            )

    def _next(self, branch: Branch, over: bool) -> Disjunction | None:
        """The next disjunction with several options; conditions that hold anyway are passed."""
        while branch.disjunctions:
            n = min(range(len(branch.disjunctions)), key=lambda n: branch.disjunctions[n].rank)
            disjunction = branch.disjunctions.pop(n)
            if over:
                return disjunction
            own = Literal(disjunction.subschema)
            if disjunction.denied and self.apart(branch.facts, own):
                continue
            if disjunction.condition is not None:
                if self.apart(branch.facts, disjunction.condition):
                    return disjunction.only(1)
                if self.apart(branch.facts, disjunction.condition.opposite):
                    return disjunction.only(0)
                split = disjunction.split(branch.facts)
                if split is not None:
                    branch.disjunctions.append(disjunction)
                    return split
            return disjunction
        facts = branch.facts
        if facts.leftover and not over:  # in a proof, more may be evaluated later
            settle_leftovers(facts)
        return some_property(self, facts, over) if facts.some else None

    def _consistent(self, facts: Facts, over: bool, depth: int) -> bool:
        """Whether nothing shows that no value is left."""
        if facts.values is not None:
            left = [v for v in facts.values.values() if self.fits(facts, v, True, depth)]
            facts.only(left)
            return not facts.dead
        if depth <= 0:
            return True
        return all(self.possible(literals, depth - 1) for literals in _demanded(facts))

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
            return facts.number.fits(exact(value))
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
