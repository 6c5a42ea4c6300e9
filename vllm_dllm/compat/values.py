"""What an expression in our source may be, as far as reading it tells."""

from __future__ import annotations

import ast
from collections import ChainMap
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vllm:
    """Something of vLLM's: a module, or what a path through one leads to.

    The path is written as we reach it: a module, a colon, then names. ``()`` stands for what the
    name before it gives when it is called: ``vllm.config:get_current_vllm_config().model_config``.
    """

    path: str

    def attribute(self, name: str) -> Vllm:
        """The path to an attribute of this."""
        return Vllm(f"{self.path}{'.' if ':' in self.path else ':'}{name}")

    def called(self) -> Vllm:
        """The path to what calling this gives; an instance if it is a class."""
        return Vllm(f"{self.path}()")

    def type(self) -> Vllm:
        """The path to the class of this."""
        return Vllm(self.path.removesuffix("()"))


@dataclass(frozen=True)
class Text:
    """A string."""

    value: str


@dataclass(frozen=True)
class Items:
    """A tuple, a list or a set; each item may be one of several values."""

    items: tuple[Values, ...]


@dataclass(frozen=True)
class Pairs:
    """A dictionary."""

    items: tuple[tuple[Values, Values], ...]


@dataclass(eq=False)
class Module:
    """A module of ours; `scope` has its globals."""

    name: str
    path: str
    tree: ast.Module
    scope: Scope


@dataclass(frozen=True)
class Global:
    """A name of a module of ours that another imports; looked up when it is used."""

    module: str
    name: str


@dataclass(eq=False)
class Function:
    """A function of ours, and the scope that it was defined in."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    owner: Class | None = None


@dataclass(frozen=True)
class Bound:
    """A method of ours with the instance that it was taken from."""

    function: Function
    instance: Values


@dataclass(eq=False)
class Class:
    """A class of ours.

    Attributes:
        bases: what it derives from, of ours or vLLM's.
        methods: its own.
        fields: what its instances' other attributes may be.
    """

    module: Module
    node: ast.ClassDef
    bases: tuple[Value, ...]
    methods: dict[str, Function] = field(default_factory=dict)
    fields: dict[str, Values] = field(default_factory=dict)

    def ours(self) -> list[Class]:
        """This class and those of ours that it derives from, the nearest first."""
        return [self, *(c for base in self.bases if isinstance(base, Class) for c in base.ours())]

    def vllms(self) -> list[Vllm]:
        """The classes of vLLM that it derives from through classes of ours only."""
        return [base for cls in self.ours() for base in cls.bases if isinstance(base, Vllm)]


@dataclass(frozen=True)
class Instance:
    """An instance of a class of ours, with the fields that its constructor was given."""

    of: Class
    given: tuple[tuple[str, Values], ...] = ()


@dataclass(frozen=True)
class Super:
    """``super()`` in a method of a class of ours."""

    of: Class


Value = Vllm | Text | Items | Pairs | Module | Global | Function | Bound | Class | Instance | Super
Values = frozenset[Value]
Scope = ChainMap[str, Values]
NOTHING: Values = frozenset()


def tells_of_vllm(values: Values) -> bool:
    """Whether something of vLLM's or its name, or what holds it, is among values."""
    for value in values:
        if isinstance(value, Items) and any(map(tells_of_vllm, value.items)):
            return True
        if isinstance(value, Instance) and any(tells_of_vllm(held) for _, held in value.given):
            return True
        if isinstance(value, Text) and value.value.startswith("vllm."):
            return True
        if isinstance(value, Vllm):
            return True
    return False


def dotted(node: ast.expr) -> str:
    """A name with its attributes, or nothing for any other expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def texts(values: Values) -> list[str]:
    """The strings among values."""
    return sorted(value.value for value in values if isinstance(value, Text))
