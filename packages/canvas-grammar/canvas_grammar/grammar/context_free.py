"""Analyse grammars whose rules call each other, and make them ready to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Chain,
    Either,
    Node,
    Repeat,
    either,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.grammar.rules import Call, Rule, WithoutFirst
from canvas_grammar.limits import ConstraintError


def calls(node: Node) -> Iterator[Rule]:
    """The rules that a language calls, each as often as its tree does; shared parts count once."""
    waiting, seen = [node], set()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, Call):
                yield part.rule
            waiting += part.inside()


def reachable(root: Rule) -> list[Rule]:
    """All rules that `root` calls, in any number of steps, with `root` itself first."""
    found, waiting = {root: None}, [root]
    while waiting:
        for rule in calls(waiting.pop().body):
            if rule not in found:
                found[rule] = None
                waiting.append(rule)
    return list(found)


def cycles(edges: Mapping[Rule, Collection[Rule]]) -> list[list[Rule]]:
    """The sets of rules that lead to each other along `edges` and back to themselves."""
    backwards: dict[Rule, list[Rule]] = {rule: [] for rule in edges}
    for rule, ends in edges.items():
        for end in ends:
            backwards[end].append(rule)
    order: list[Rule] = []
    seen: set[Rule] = set()
    for rule in edges:
        order += _finished(rule, edges, seen)
    seen.clear()
    groups = [_finished(rule, backwards, seen) for rule in reversed(order)]
    return [group for group in groups if group and (group[1:] or group[0] in edges[group[0]])]


def _finished(rule: Rule, edges: Mapping[Rule, Collection[Rule]], seen: set[Rule]) -> list[Rule]:
    """Rules not seen yet that `rule` leads to, in the order in which a search leaves them."""
    if rule in seen:
        return []
    seen.add(rule)
    order, path = [], [(rule, iter(edges[rule]))]
    while path:
        end = next((end for end in path[-1][1] if end not in seen), None)
        if end is None:
            order.append(path.pop()[0])
        else:
            seen.add(end)
            path.append((end, iter(edges[end])))
    return order


def may_be_empty(node: Node, nullable: Collection[Rule] = ()) -> bool:
    """Whether the empty text belongs to a language, given the rules that contain it."""
    if isinstance(node, Call):
        return node.rule in nullable
    if isinstance(node, Chain):
        return all(may_be_empty(part, nullable) for part in node.parts)
    if isinstance(node, Either):
        return any(may_be_empty(option, nullable) for option in node.options)
    return isinstance(node, Repeat) and (node.least == 0 or may_be_empty(node.part, nullable))


def drop_dead_calls(rules: Iterable[Rule], node: Node = NOTHING) -> Node:
    """Take the calls of rules that derive no text out of the rules' bodies, and of a language."""
    own = set(rules)

    def productive(node: Node, known: set[Rule]) -> bool:
        if isinstance(node, Call):
            return node.rule in known or node.rule not in own
        inside = (productive(part, known) for part in node.inside())
        if isinstance(node, Either):
            return any(inside)
        if isinstance(node, Repeat) and node.least == 0:
            return True
        if isinstance(node, Chain | Repeat | WithoutFirst):
            return all(inside)
        return not node.empty

    dead = own - _closure(own, productive)
    if not dead:
        return node

    def alive(rule: Rule) -> Node:
        return NOTHING if rule in dead else Call(rule)

    known: dict[int, Node] = {}
    bodies = {rule: rule.body for rule in own}  # holds the nodes that `known` names
    for rule, body in bodies.items():
        rule.body = replaced(body, alive, known)
    return replaced(node, alive, known)


def _closure(rules: Collection[Rule], holds: Callable[[Node, set[Rule]], bool]) -> set[Rule]:
    """The least set of rules for whose bodies `holds` is true, given that set."""
    found: set[Rule] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        found |= {rule for rule in rules if rule not in found and holds(rule.body, found)}
    return found


def replaced(node: Node, replace: Callable[[Rule], Node], known: dict[int, Node]) -> Node:
    """A language with other languages in place of its calls.

    `replace` gives the language in place of a rule's call, and `known` what has been replaced, by
    the `id` of the node, which its owner must keep.
    """
    if id(node) not in known:
        known[id(node)] = _replaced(node, replace, known)
    return known[id(node)]


def _replaced(node: Node, replace: Callable[[Rule], Node], known: dict[int, Node]) -> Node:
    if isinstance(node, Call):
        return replace(node.rule)
    if not any(True for _ in calls(node)):
        return node
    inside = [replaced(part, replace, known) for part in node.inside()]
    if isinstance(node, Chain):
        return sequence(*inside)
    if isinstance(node, Either):
        return either(inside)
    if isinstance(node, Repeat):
        return repeat(inside[0], node.least, node.most)
    if isinstance(node, WithoutFirst):
        return NOTHING if inside[0].empty else WithoutFirst(node.first, inside[0])
    return NOTHING if node.empty else node


# ---- Grammars whose rules may begin or end with calls of themselves, made ready to be compiled.
#
# A compiled rule must not begin with a call of itself, and each call that is open takes a place of
# a bounded stack. Both kinds of recursion repeat something, so they are rewritten as repetitions:
# the least solution of ``A = A w | b`` is ``b w*``, and that of ``A = w A | b`` is ``w* b``, also
# where ``w`` and ``b`` call ``A`` somewhere else. Rules that begin (or end) with calls of each
# other are such equations in several unknowns, which are eliminated one after the other.


@dataclass
class _Equation:
    """A language as ``A w_A | B w_B | ... | rest``, from its start (or, mirrored, its end)."""

    factors: dict[Rule, Node] = field(default_factory=dict)
    rest: Node = NOTHING

    def add(self, rule: Rule, factor: Node) -> None:
        self.factors[rule] = either([self.factors.get(rule, NOTHING), factor])


def without_edge_recursion(root: Rule) -> Node:
    """The language of `root`, rewritten so that no rule begins with a call of itself.

    Recursion at the end of a rule becomes repetition as well where that is simple.
    """
    language = _without_empty_rules(root)
    for mirrored in (False, True):
        side = _Side(mirrored)
        for group in cycles({rule: side.edge(rule.body) for rule in reachable(root)}):
            side.eliminate(group)
    return language


def _without_empty_rules(root: Rule) -> Node:
    """The language of `root`, with optional calls of rules in place of rules that may be empty."""
    rules = reachable(root)
    bodies = {rule: rule.body for rule in rules}  # holds the nodes that `known` names
    empty = _closure(rules, may_be_empty)
    known: dict[int, Node] = {}

    def replace(rule: Rule) -> Node:
        if rule in empty and not any(True for _ in calls(bodies[rule])):
            return bodies[rule]
        return optional(Call(rule)) if rule in empty else Call(rule)

    for rule, body in bodies.items():
        rule.body = replaced(body, replace, known)
        if rule in empty:
            rule.body = _nonempty(rule.body)
    return replace(root)


def _nonempty(node: Node) -> Node:
    """The texts of a language except the empty one; none of its rules may be empty."""
    if not may_be_empty(node):
        return node
    if isinstance(node, Either):
        return either(_nonempty(option) for option in node.options)
    if isinstance(node, Repeat):
        most = None if node.most is None else node.most - 1
        return sequence(_nonempty(node.part), repeat(node.part, 0, most))
    assert isinstance(node, Chain)
    if not node.parts:
        return NOTHING
    first, rest = node.parts[0], sequence(*node.parts[1:])
    return either([sequence(_nonempty(first), rest), _nonempty(rest)])


class _Side:
    """The start of languages or, mirrored, their end."""

    def __init__(self, mirrored: bool) -> None:
        self.mirrored = mirrored
        self._edges: dict[int, tuple[Node, frozenset[Rule]]] = {}

    def concat(self, near: Node, far: Node) -> Node:
        return sequence(far, near) if self.mirrored else sequence(near, far)

    def inward(self, chain: Chain) -> tuple[Node, ...]:
        return chain.parts[::-1] if self.mirrored else chain.parts

    def edge(self, node: Node) -> frozenset[Rule]:
        """Rules that are called at the edge of a text of the language."""
        known = self._edges.get(id(node))
        if known is None:
            # The node is kept, because an `id` is unique among living objects only.
            known = self._edges[id(node)] = (node, frozenset(self._edge(node)))
        return known[1]

    def _edge(self, node: Node) -> Iterator[Rule]:
        if isinstance(node, Call):
            yield node.rule
        elif isinstance(node, Chain):
            for part in self.inward(node):
                yield from self.edge(part)
                if not may_be_empty(part):
                    return
        else:
            for part in node.inside():
                yield from self.edge(part)

    def eliminate(self, group: list[Rule]) -> None:
        """Solve the equations of rules that begin with calls of each other, and replace them."""
        members = frozenset(group)
        equations = {rule: self.split(rule.body, members) for rule in group}
        for pivot in group:
            solved = equations[pivot]
            again = repeat(solved.factors.pop(pivot, NOTHING), 0, None)
            solved.factors = {r: self.concat(w, again) for r, w in solved.factors.items()}
            solved.rest = self.concat(solved.rest, again)
            for rule in group:
                factor = equations[rule].factors.pop(pivot, None) if rule is not pivot else None
                if factor is None:
                    continue
                for other, inner in solved.factors.items():
                    equations[rule].add(other, self.concat(inner, factor))
                rest = self.concat(solved.rest, factor)
                equations[rule].rest = either([equations[rule].rest, rest])
        for rule in group:
            rule.body = equations[rule].rest

    def split(self, node: Node, members: frozenset[Rule]) -> _Equation:
        """The calls of `members` at the edge of a language, and what follows each of them."""
        if not self.edge(node) & members:
            return _Equation(rest=node)
        if isinstance(node, Call):
            return _Equation({node.rule: EMPTY_TEXT})
        found = _Equation()
        if isinstance(node, Either):
            for option in node.options:
                self._merge(found, self.split(option, members), EMPTY_TEXT)
        elif isinstance(node, Repeat):
            if self.mirrored and node.most != 1:
                return _Equation(rest=node)  # unrolling would make it larger but no better
            least = 0 if may_be_empty(node.part) else node.least
            most = None if node.most is None else node.most - 1
            part = self.split(node.part, members)
            part.rest = _nonempty(part.rest)
            self._merge(found, part, repeat(node.part, max(least - 1, 0), most))
            if least == 0:
                found.rest = either([found.rest, EMPTY_TEXT])
        else:
            assert isinstance(node, Chain)
            parts = self.inward(node)
            others = parts[:0:-1] if self.mirrored else parts[1:]
            far = sequence(*others)
            near = self.split(parts[0], members)
            if may_be_empty(near.rest) and self.edge(far) & members:
                near.rest = _nonempty(near.rest)
                self._merge(found, self.split(far, members), EMPTY_TEXT)
            self._merge(found, near, far)
        return found

    def _merge(self, found: _Equation, part: _Equation, far: Node) -> None:
        for rule, factor in part.factors.items():
            found.add(rule, self.concat(factor, far))
        found.rest = either([found.rest, self.concat(part.rest, far)])


# ---- From the rules of a grammar, as a user wrote them, to a language that can be compiled.

# A rule that does not call itself is copied to where it is called if it has at most this many byte
# positions. Open calls take places of a bounded stack, so with fewer calls texts may nest deeper.
MOST_COPIED_POSITIONS = 400


def context_free(root: Rule) -> Node:
    """The language of a grammar's first rule; an empty one is refused.

    Rules may call each other and themselves anywhere. Their bodies are replaced.
    """
    drop_dead_calls(reachable(root))
    if root.body.empty:
        raise ConstraintError(f"grammar: {root.name} allows no text at all: each would be endless")
    whole = Rule(root.name, without_edge_recursion(root))
    return _with_short_rules_copied(whole)


def _with_short_rules_copied(whole: Rule) -> Node:
    """The language of `whole`, in which calls of short rules are replaced by the rules.

    Rules that call each other in a circle are reduced to a few that call themselves.
    """
    edges = {rule: set(calls(rule.body)) for rule in reachable(whole)}
    callers: dict[Rule, set[Rule]] = {rule: set() for rule in edges}
    for caller, called in edges.items():
        for rule in called:
            callers[rule].add(caller)
    for rule in sorted(edges, key=lambda rule: rule.body.positions):
        if rule is whole or rule in edges[rule]:
            continue
        if rule.body.positions > MOST_COPIED_POSITIONS and (
            len(callers[rule]) != 1
            or sum(one is rule for caller in callers[rule] for one in calls(caller.body)) != 1
        ):
            continue
        for caller in callers[rule]:
            caller.body = replaced(caller.body, partial(_copied, rule), {})
            edges[caller] = edges[caller] - {rule} | edges[rule]
        for inner in edges.pop(rule):
            callers[inner] = callers[inner] - {rule} | callers[rule]
    return whole.body


def _copied(rule: Rule, called: Rule) -> Node:
    return rule.body if called is rule else Call(called)
