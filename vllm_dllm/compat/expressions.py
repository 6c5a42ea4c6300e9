"""What expressions of our source may be, and the use that they make of vLLM."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_dllm.compat.calls import Calls
from vllm_dllm.compat.values import (
    NOTHING,
    Bound,
    Class,
    Global,
    Instance,
    Items,
    Module,
    Pairs,
    Scope,
    Super,
    Text,
    Value,
    Values,
    Vllm,
    dotted,
    texts,
)

if TYPE_CHECKING:
    from vllm_dllm.compat.scan import Scan

# Generic types that say nothing of what they hold, so that it is taken for the value itself.
_TRANSPARENT = ("Optional", "Annotated", "ClassVar", "Final")


class Expressions:
    """Evaluates the expressions of one module of ours for a `Scan`."""

    def __init__(self, scan: Scan, module: Module) -> None:
        self.scan = scan
        self.module = module
        self.calls = Calls(self)

    def values(self, node: ast.AST | None, scope: Scope) -> Values:
        """What an expression may be; nothing where that is not known."""
        if node is None:
            return NOTHING
        evaluate: Callable[[ast.AST, Scope], Values] | None
        evaluate = getattr(self, f"_{type(node).__name__.lower()}", None)
        if evaluate is not None:
            return evaluate(node, scope)
        for child in ast.iter_child_nodes(node):
            self.values(child, scope)
        return NOTHING

    def annotated(self, node: ast.expr | None, scope: Scope) -> Values:
        """What a variable may be that has this annotation."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, scope)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, scope) | self.annotated(node.right, scope)
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rpartition(".")[2]
            if name == "type":
                return self.values(node.slice, scope)
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            held = [self.annotated(part, scope) for part in inner]
            if name in _TRANSPARENT:
                return held[0]
            if name in ("dict", "Mapping", "MutableMapping") and len(held) == 2:
                return frozenset({Pairs(((held[0], held[1]),))})
            return frozenset({Items((frozenset().union(*held),))}) | self.annotated(
                node.value, scope
            )
        if not isinstance(node, ast.Name | ast.Attribute):
            return NOTHING
        found: set[Value] = set()
        for value in self.values(node, scope):
            if isinstance(value, Vllm):
                found.add(value.called())
            elif isinstance(value, Class):
                found.add(Instance(value))
        return frozenset(found)

    def elements(self, values: Values) -> list[Values]:
        """What a loop over one of these goes through."""
        found: list[Values] = []
        for value in values:
            if isinstance(value, Items):
                found += value.items
            elif isinstance(value, Pairs):
                found += (key for key, _ in value.items)
        return found

    def attribute(self, value: Value, name: str, line: int) -> Values:
        """What an attribute of a value may be."""
        if isinstance(value, Vllm):
            self.scan.use(value.attribute(name), "used", self.module, line)
            return frozenset({value.attribute(name)})
        if isinstance(value, Module):
            return self.scan.global_of(value.name, name)
        if isinstance(value, Class):
            return self._member(value, name, line, None)
        if isinstance(value, Instance):
            given = dict(value.given)
            return given[name] if name in given else self._member(value.of, name, line, value)
        if isinstance(value, Super):
            found: Values = NOTHING
            for base in value.of.bases:
                found |= self.attribute(base, name, line)
            return found
        return NOTHING

    def _member(self, cls: Class, name: str, line: int, instance: Instance | None) -> Values:
        found: Values = NOTHING
        for one in cls.ours():
            if name in one.methods:
                method = one.methods[name]
                kinds = {dotted(d).rpartition(".")[2] for d in method.node.decorator_list}
                if "classmethod" in kinds:
                    return frozenset({Bound(method, frozenset({cls}))})
                if instance is None or "staticmethod" in kinds:
                    return frozenset({method})
                bound = Bound(method, frozenset({instance}))
                if kinds & {"property", "cached_property"}:
                    return self.scan.call(bound, [], {})
                return frozenset({bound})
            found |= one.fields.get(name, NOTHING)
        if not found:
            for base in cls.vllms():
                found |= self.attribute(base.called() if instance else base, name, line)
        return found

    def _constant(self, node: ast.Constant, scope: Scope) -> Values:
        return frozenset({Text(node.value)}) if isinstance(node.value, str) else NOTHING

    def _joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Values:
        parts = [
            texts(self.values(p.value if isinstance(p, ast.FormattedValue) else p, scope))
            for p in node.values
        ]
        return frozenset(Text("".join(part)) for part in itertools.product(*parts))

    def _name(self, node: ast.Name, scope: Scope) -> Values:
        return self.resolved(scope.get(node.id, NOTHING))

    def resolved(self, values: Values) -> Values:
        """The same values, with what was imported from other modules of ours looked up."""
        found: set[Value] = set()
        for value in values:
            if isinstance(value, Global):
                found |= self.scan.global_of(value.module, value.name)
            else:
                found.add(value)
        return frozenset(found)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        found: Values = NOTHING
        for value in self.values(node.value, scope):
            found |= self.attribute(value, node.attr, node.lineno)
        return found

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Values:
        index = self.values(node.slice, scope)
        if dotted(node.value) == "sys.modules":
            return self.modules(index, node.lineno)
        found: Values = NOTHING
        for value in self.values(node.value, scope):
            if isinstance(value, Items):
                found |= frozenset().union(*value.items)
            elif isinstance(value, Pairs):
                known = [held for key, held in value.items if key & index]
                found |= frozenset().union(*(known or [held for _, held in value.items]))
        return found

    def modules(self, names: Values, line: int) -> Values:
        """The modules of vLLM with these names."""
        found: set[Value] = set()
        for name in texts(names):
            if name.partition(".")[0] == "vllm":
                self.scan.use(Vllm(name), "imported", self.module, line)
                found.add(Vllm(name))
        return frozenset(found)

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Values:
        return frozenset({Items(tuple(self.values(item, scope) for item in node.elts))})

    _list = _set = _tuple

    def _dict(self, node: ast.Dict, scope: Scope) -> Values:
        pairs = zip(node.keys, node.values, strict=True)
        known = tuple((self.values(k, scope), self.values(v, scope)) for k, v in pairs)
        return frozenset({Pairs(known)})

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Values:
        self.values(node.test, scope)
        return self.values(node.body, scope) | self.values(node.orelse, scope)

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Values:
        return frozenset().union(*(self.values(value, scope) for value in node.values))

    def _namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Values:
        scope[node.target.id] = self.values(node.value, scope)
        return scope[node.target.id]

    def _await(self, node: ast.Await, scope: Scope) -> Values:
        return self.values(node.value, scope)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> Values:
        inner = scope.new_child({arg.arg: NOTHING for arg in node.args.args})
        self.values(node.body, inner)
        return NOTHING

    def _listcomp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope
    ) -> Values:
        found = [self.values(node.elt, inner) for inner in self._rounds(node.generators, scope)]
        return frozenset({Items(tuple(found))})

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, scope: Scope) -> Values:
        rounds = self._rounds(node.generators, scope)
        pairs = ((self.values(node.key, r), self.values(node.value, r)) for r in rounds)
        return frozenset({Pairs(tuple(pairs))})

    def _rounds(self, generators: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        if not generators:
            yield scope
            return
        first, *others = generators
        for element in self.elements(self.values(first.iter, scope)) or [NOTHING]:
            inner = scope.new_child()
            self.bind(first.target, element, inner)
            for condition in first.ifs:
                self.values(condition, inner)
            yield from self._rounds(others, inner)

    def bind(self, target: ast.AST, values: Values, scope: Scope) -> None:
        """Assign values to a target."""
        if isinstance(target, ast.Name):
            scope[target.id] = values
        elif isinstance(target, ast.Tuple | ast.List):
            whole = [v.items for v in values if isinstance(v, Items)]
            for i, part in enumerate(target.elts):
                found = [items[i] for items in whole if len(items) == len(target.elts)]
                self.bind(part, frozenset().union(*found), scope)
        elif isinstance(target, ast.Attribute):
            for owner in self.values(target.value, scope):
                if isinstance(owner, Instance):
                    fields = owner.of.fields
                    fields[target.attr] = fields.get(target.attr, NOTHING) | values
                elif isinstance(owner, Vllm):
                    self.scan.use(owner.attribute(target.attr), "set", self.module, target.lineno)
        else:
            self.values(target, scope)

    def _call(self, node: ast.Call, scope: Scope) -> Values:
        return self.calls.values(node, scope)
