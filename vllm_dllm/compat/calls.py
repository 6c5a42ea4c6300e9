"""What calls in our source may give, and the use that they make of vLLM."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_dllm.compat.values import (
    NOTHING,
    Bound,
    Class,
    Function,
    Items,
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
    from vllm_dllm.compat.expressions import Expressions

_IMPORTS = ("sys.modules.get", "import_module", "importlib.import_module")


class Calls:
    """Evaluates the calls of one module of ours."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions
        self.scan = expressions.scan
        self.module = expressions.module

    def values(self, node: ast.Call, scope: Scope) -> Values:
        """What a call may give."""
        args = [self.expressions.values(arg, scope) for arg in node.args]
        keywords = {k.arg: self.expressions.values(k.value, scope) for k in node.keywords if k.arg}
        for keyword in node.keywords:
            if not keyword.arg:
                self.expressions.values(keyword.value, scope)
        name = dotted(node.func)
        if name in _IMPORTS:
            return self.expressions.modules(args[0], node.lineno)
        if name in ("getattr", "hasattr"):
            found = [
                self.expressions.attribute(value, text, node.lineno)
                for value in args[0]
                for text in texts(args[1])
            ]
            return frozenset().union(*found, *args[2:])
        if name == "type":
            return self._type(args, node.lineno)
        if name == "super":
            return frozenset({Super(c) for c in scope.get("__class__", ()) if isinstance(c, Class)})
        if name == "cast":
            return self.expressions.annotated(node.args[0], scope)
        found_values: Values = NOTHING
        for function in self.expressions.values(node.func, scope):
            found_values |= self._result(function, args, keywords, node)
        if isinstance(node.func, ast.Attribute) and not found_values:
            return self._builtin_method(self.expressions.values(node.func.value, scope), node)
        return found_values

    def _result(
        self, function: Value, args: list[Values], keywords: dict[str, Values], node: ast.Call
    ) -> Values:
        if isinstance(function, Vllm):
            self.scan.use(function.called(), "called", self.module, node.lineno)
            return frozenset({function.called()})
        if isinstance(function, Class):
            return self.scan.construct(function, args, keywords)
        if isinstance(function, Function) and self.scan.is_wrap(function):
            self.scan.wrap(args, self.module, node)
            return NOTHING
        if isinstance(function, Function | Bound):
            return self.scan.call(function, args, keywords)
        return NOTHING

    def _type(self, args: list[Values], line: int) -> Values:
        """The class of a value, or a class that is made of a name, bases and methods."""
        if len(args) == 1:
            return frozenset(value.type() for value in args[0] if isinstance(value, Vllm))
        names = [texts(key) for v in args[2] if isinstance(v, Pairs) for key, _ in v.items]
        for base in itertools.chain(*self.expressions.elements(args[1])):
            if isinstance(base, Vllm):
                self.scan.use(base, "subclassed", self.module, line)
                for name in itertools.chain(*names):
                    self.scan.use(base.attribute(name), "overridden", self.module, line)
        return NOTHING

    def _builtin_method(self, owners: Values, node: ast.Call) -> Values:
        """What a method of a string or a dictionary gives."""
        assert isinstance(node.func, ast.Attribute)
        name, found = node.func.attr, set[Value]()
        for owner in owners:
            if isinstance(owner, Text) and name in ("split", "rsplit"):
                if all(isinstance(arg, ast.Constant) for arg in node.args):
                    parts = getattr(owner.value, name)(*(ast.literal_eval(a) for a in node.args))
                    found.add(Items(tuple(frozenset({Text(part)}) for part in parts)))
            elif isinstance(owner, Pairs):
                kinds: dict[str, Iterable[Values]] = {
                    "items": (frozenset({Items(pair)}) for pair in owner.items),
                    "keys": (key for key, _ in owner.items),
                    "values": (held for _, held in owner.items),
                }
                if name in kinds:
                    found.add(Items(tuple(kinds[name])))
        return frozenset(found)
