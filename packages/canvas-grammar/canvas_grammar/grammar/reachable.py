"""What is to be known of all rules of a grammar: which are called, recursive, empty or useless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from canvas_grammar.grammar.language import (
    NOTHING,
    Chain,
    Either,
    Node,
    Repeat,
    either,
    repeat,
    sequence,
)
from canvas_grammar.grammar.rules import Behind, Call, Rule


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
    """All rules that `root` calls, in whatever number of steps, and itself first."""
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


def empty_rules(rules: Collection[Rule]) -> set[Rule]:
    """The rules whose languages contain the empty text."""
    return _closure(rules, may_be_empty)


def may_be_empty(node: Node, nullable: Collection[Rule] = ()) -> bool:
    """Whether the empty text belongs to a language, given the rules of which it does."""
    if isinstance(node, Call):
        return node.rule in nullable
    if isinstance(node, Chain):
        return all(may_be_empty(part, nullable) for part in node.parts)
    if isinstance(node, Either):
        return any(may_be_empty(option, nullable) for option in node.options)
    return isinstance(node, Repeat) and (node.least == 0 or may_be_empty(node.part, nullable))


def productive_rules(rules: Collection[Rule]) -> set[Rule]:
    """The rules whose languages contain any text at all. All that is called beside them does."""
    own = set(rules)

    def productive(node: Node, known: set[Rule]) -> bool:
        if isinstance(node, Call):
            return node.rule in known or node.rule not in own
        if isinstance(node, Chain):
            return all(productive(part, known) for part in node.parts)
        if isinstance(node, Either):
            return any(productive(option, known) for option in node.options)
        if isinstance(node, Repeat):
            return node.least == 0 or productive(node.part, known)
        if isinstance(node, Behind):
            return productive(node.rest, known)
        return not node.empty

    return _closure(rules, productive)


def _closure(rules: Collection[Rule], holds: Callable[[Node, set[Rule]], bool]) -> set[Rule]:
    """The least set of rules of whose bodies `holds` says yes, given that set."""
    found: set[Rule] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        found |= {rule for rule in rules if rule not in found and holds(rule.body, found)}
    return found


def replaced(node: Node, replace: Callable[[Rule], Node], known: dict[int, Node]) -> Node:
    """A language with other languages in place of its calls.

    Args:
        node: the language.
        replace: the language in place of a rule's call.
        known: what has been replaced, by the `id` of the node, which its owner must keep.
    """
    if id(node) not in known:
        known[id(node)] = _replaced(node, replace, known)
    return known[id(node)]


def _replaced(node: Node, replace: Callable[[Rule], Node], known: dict[int, Node]) -> Node:
    if isinstance(node, Call):
        return replace(node.rule)
    if not any(True for _ in calls(node)):
        return node
    if isinstance(node, Chain):
        return sequence(*(replaced(part, replace, known) for part in node.parts))
    if isinstance(node, Either):
        return either(replaced(option, replace, known) for option in node.options)
    if isinstance(node, Repeat):
        return repeat(replaced(node.part, replace, known), node.least, node.most)
    if isinstance(node, Behind):
        rest = replaced(node.rest, replace, known)
        return NOTHING if rest.empty else Behind(node.first, rest)
    return NOTHING if node.empty else node
