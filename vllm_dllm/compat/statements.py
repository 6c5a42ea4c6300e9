"""Reads the statements of our source: what names become, and the classes and functions in it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_dllm.compat.expressions import Expressions
from vllm_dllm.compat.values import (
    NOTHING,
    Class,
    Function,
    Global,
    Instance,
    Module,
    Scope,
    Value,
    Values,
    Vllm,
    dotted,
)

if TYPE_CHECKING:
    from vllm_dllm.compat.scan import Scan

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Statements:
    """Reads one module of ours for a `Scan`."""

    def __init__(self, scan: Scan, module: Module) -> None:
        self.scan = scan
        self.module = module
        self.expressions = Expressions(scan, module)
        self._functions: list[Function] = []
        self._classes: dict[ast.ClassDef, Class] = {}
        # Of the function that is being read: what it returns, and what is defined in it.
        self._returned: Values = NOTHING
        self._inner: list[Function] = []

    def read_module(self) -> None:
        """Read the module's own statements; its functions' bodies come after."""
        self._inner = []
        self._read(self.module.tree.body, self.module.scope)
        self._functions = self._inner

    def read_functions(self) -> None:
        """Read the bodies of functions and methods, with what their annotations tell."""
        for function in self._functions:
            self.scan.read(function)
        for cls in self._classes.values():
            self._read_methods(cls)

    def _read_methods(self, cls: Class) -> None:
        """Read the methods of a class, and those that it has from other classes of ours."""
        bases = cls.vllms()
        for one in cls.ours():
            for name, method in one.methods.items():
                for base in bases:
                    line = method.node.lineno
                    self.scan.use(base.attribute(name), "overridden", one.module, line)
                self.scan.read(method, _receiver(method, cls))

    def read_body(self, function: Function, known: dict[str, Values], inner: Values) -> Values:
        """What a function may return. For the arguments see `Scan`."""
        scope = function.scope.new_child()
        arguments = function.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            annotation = argument.annotation
            scope[argument.arg] = known.get(argument.arg) or self.expressions.annotated(
                annotation, function.scope
            )
        outside = self._returned, self._inner
        self._returned, self._inner = NOTHING, []
        self._read(function.node.body, scope)
        for nested in self._inner:
            first = [a.arg for a in nested.node.args.args[:1]] if inner else []
            self.scan.read(nested, dict.fromkeys(first, inner))
        returned = self._returned | self.expressions.annotated(
            function.node.returns, function.scope
        )
        self._returned, self._inner = outside
        return returned

    def _read(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in statements:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        values = self.expressions.values
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                function = self._function(node, scope)
                scope[node.name] = frozenset({function})
                self._inner.append(function)
            case ast.ClassDef():
                scope[node.name] = frozenset({self._class(node, scope)})
            case ast.Assign():
                value = values(node.value, scope)
                for target in node.targets:
                    self.expressions.bind(target, value, scope)
            case ast.AnnAssign():
                value = values(node.value, scope) or self.expressions.annotated(
                    node.annotation, scope
                )
                self.expressions.bind(node.target, value, scope)
            case ast.Return():
                self._returned |= values(node.value, scope)
            case ast.If():
                values(node.test, scope)
                self._either(scope, node.body, node.orelse)
            case ast.For() | ast.AsyncFor():
                for element in self.expressions.elements(values(node.iter, scope)) or [NOTHING]:
                    self.expressions.bind(node.target, element, scope)
                    self._read(node.body, scope)
                self._read(node.orelse, scope)
            case ast.While():
                values(node.test, scope)
                self._either(scope, node.body, node.orelse)
            case ast.Try():
                self._either(scope, node.body, *(handler.body for handler in node.handlers))
                self._read([*node.orelse, *node.finalbody], scope)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = values(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self.expressions.bind(item.optional_vars, value, scope)
                self._read(node.body, scope)
            case _:
                values(node, scope)

    def _either(self, scope: Scope, *branches: Sequence[ast.stmt]) -> None:
        """Read branches of which one runs; afterwards a name may be what any of them made it."""
        before = dict(scope.maps[0])
        after: dict[str, Values] = {}
        for branch in branches:
            scope.maps[0].clear()
            scope.maps[0].update(before)
            self._read(branch, scope)
            for name, values in scope.maps[0].items():
                after[name] = after.get(name, NOTHING) | values
        scope.maps[0].update(after)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        module = "" if isinstance(node, ast.Import) else node.module or ""
        for alias in node.names:
            name = alias.asname or alias.name
            value: Value
            if isinstance(node, ast.Import):
                if alias.name.partition(".")[0] != "vllm":
                    continue
                value = Vllm(alias.name if alias.asname else "vllm")
                name = alias.asname or "vllm"
            elif module.partition(".")[0] == "vllm":
                value = Vllm(module).attribute(alias.name)
            elif f"{module}.{alias.name}" in self.scan.modules:
                value = self.scan.modules[f"{module}.{alias.name}"]
            elif module in self.scan.modules:
                value = Global(module, alias.name)
            else:
                continue
            if isinstance(value, Vllm):
                self.scan.use(value, "imported", self.module, node.lineno)
            scope[name] = frozenset({value})

    def _function(self, node: _Definition, scope: Scope, owner: Class | None = None) -> Function:
        for expression in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            self.expressions.values(expression, scope)
        return Function(self.module, node, scope, owner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> Class:
        bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
        found = [value for base in bases for value in self.expressions.values(base, scope)]
        known = tuple(value for value in found if isinstance(value, Vllm | Class))
        cls = self._classes.setdefault(node, Class(self.module, node, known))
        cls.bases = known
        for base in cls.vllms():
            self.scan.use(base, "subclassed", self.module, node.lineno)
        inner = scope.new_child({"__class__": frozenset({cls})})
        for statement in node.body:
            if isinstance(statement, _Definition):
                cls.methods[statement.name] = self._function(statement, inner, cls)
            else:
                self._statement(statement, inner)
        for name, values in inner.maps[0].items():
            if name != "__class__" and values:
                cls.fields[name] = cls.fields.get(name, NOTHING) | values
        return cls


def _receiver(method: Function, cls: Class) -> dict[str, Values]:
    """What the first parameter of a method of a class is."""
    parameters = [*method.node.args.posonlyargs, *method.node.args.args]
    kinds = {dotted(decorator) for decorator in method.node.decorator_list}
    if not parameters or "staticmethod" in kinds:
        return {}
    receiver: Value = cls if "classmethod" in kinds else Instance(cls)
    return {parameters[0].arg: frozenset({receiver})}
