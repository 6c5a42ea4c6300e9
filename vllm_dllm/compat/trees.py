"""What the syntax trees of a vLLM's modules and classes define."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef


class ModuleNames:
    """What a module defines and imports at its top level."""

    def __init__(self, name: str, package: bool, text: str) -> None:
        self.defined: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        self.stars: list[str] = []
        self._parent = name if package else name.rpartition(".")[0]
        for node in flattened(ast.parse(text).body):
            if isinstance(node, ast.ImportFrom):
                self._take_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self.imported[alias.asname] = (alias.name, "")
            else:
                for defined in names_of(node):
                    self.defined.setdefault(defined, []).append(node)

    def _take_from(self, node: ast.ImportFrom) -> None:
        parts = self._parent.split(".")
        base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                self.imported[alias.asname or alias.name] = (module, alias.name)


def flattened(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with those inside conditions, ``try`` and ``with`` in the place of these."""
    for node in statements:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = getattr(node, "handlers", [])
            for body in (
                node.body,
                *(handler.body for handler in handlers),
                getattr(node, "orelse", []),
                getattr(node, "finalbody", []),
            ):
                yield from flattened(body)
        else:
            yield node


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def members_of(cls: ast.ClassDef | None) -> dict[str, list[ast.stmt]]:
    """What a class defines, and the attributes that its methods set."""
    found: dict[str, list[ast.stmt]] = {}
    if cls is None:
        return found
    body = list(flattened(cls.body))
    for node in body:
        for name in names_of(node):
            found.setdefault(name, []).append(node)
    own = set(found)
    for method in body:
        if isinstance(method, Function):
            for name, node in _set_by(method):
                if name not in own:
                    found.setdefault(name, [node])
    return found


def _set_by(method: Function) -> Iterator[tuple[str, ast.stmt]]:
    """The attributes of ``self`` that a method sets, as statements with their annotations."""
    parameters = {arg.arg: arg.annotation for arg in method.args.args + method.args.kwonlyargs}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], None
        else:
            continue
        for target in targets:
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                continue
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
            if isinstance(value, ast.Name):
                annotation = parameters.get(value.id)
            elif isinstance(value, ast.Call):
                annotation = value.func
            name = ast.Name(target.attr)
            set_here = ast.AnnAssign(name, annotation or ast.Constant(None), None, simple=0)
            yield target.attr, set_here
