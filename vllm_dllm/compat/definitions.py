"""What the paths that `scan` finds lead to in a vLLM, found by reading its source."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass

from vllm_dllm.compat.sources import Source
from vllm_dllm.compat.trees import Function, ModuleNames, flattened, members_of, names_of

# vLLM finds out on which platform it runs. What we wrap of it is the CPU's.
_DECIDED_LATER = {"vllm.platforms:current_platform": "vllm.platforms.cpu:CpuPlatform"}
_STEP = re.compile(r"\(\)|[^.()]+")


@dataclass(frozen=True)
class Definition:
    """Where something is defined.

    Attributes:
        module: the module with the definition.
        name: dotted, as ``Class.method``; empty for the module itself.
        nodes: the statements that define it, several where they depend on a condition.
    """

    module: str
    name: str
    nodes: tuple[ast.stmt, ...]

    @property
    def place(self) -> str:
        """The module and the name."""
        return f"{self.module}:{self.name}" if self.name else self.module

    @property
    def cls(self) -> ast.ClassDef | None:
        """The class, if it is one."""
        found = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        return found[-1] if found else None


class Definitions:
    """Finds definitions in a vLLM."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._modules: dict[str, ModuleNames | None] = {}
        # By the place of a class: what it has itself, and the classes that `_line` gives.
        self._members: dict[str, dict[str, list[ast.stmt]]] = {}
        self._lines: dict[str, list[Definition]] = {}

    def find(self, path: str) -> Definition | None:
        """What a path leads to, or None.

        A path that ends in ``()`` leads to the constructor of a class, and nowhere for a function:
        that is found without it.
        """
        for start, meant in _DECIDED_LATER.items():
            if path.startswith(start):
                path = meant + path[len(start) :]
        module, _, names = path.partition(":")
        found: Definition | None = self._module(module)
        steps = _STEP.findall(names)
        for i, step in enumerate(steps):
            if found is None:
                return None
            if step != "()":
                found = self._attribute(found, step)
            elif i == len(steps) - 1:
                return self._constructor(found)
            else:
                found = self._class_of_result(found)
        return found

    def members(self, path: str) -> list[str]:
        """The names of what vLLM's classes give to a class that derives from this one."""
        found = self.find(path)
        if found is None or found.cls is None:
            return []
        bodies = (one.cls.body for one in self._line(found) if one.cls is not None)
        return sorted({name for body in bodies for n in flattened(body) for name in names_of(n)})

    def elsewhere(self, name: str) -> list[str]:
        """The modules that define a top-level name."""
        line = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b", re.MULTILINE)
        every = ((module, self.source.text(module) or "") for module in self.source.files)
        return sorted(module for module, text in every if name in text and line.search(text))

    def _names(self, module: str) -> ModuleNames | None:
        if module not in self._modules:
            text = self.source.text(module)
            package = self.source.files.get(module, "").endswith("__init__.py")
            self._modules[module] = None if text is None else ModuleNames(module, package, text)
        return self._modules[module]

    def _module(self, name: str) -> Definition | None:
        return Definition(name, "", ()) if name in self.source.files else None

    def _attribute(self, owner: Definition, name: str) -> Definition | None:
        if not owner.name:
            return self._global(owner.module, name, set())
        cls = self._type(owner)
        if cls is None:
            return None
        for one in self._line(cls):
            if one.place not in self._members:
                self._members[one.place] = members_of(one.cls)
            nodes = self._members[one.place].get(name)
            if nodes:
                return Definition(one.module, f"{one.name}.{name}", tuple(nodes))
        return None

    def _global(self, module: str, name: str, seen: set[str]) -> Definition | None:
        names = self._names(module)
        if names is None or module in seen:
            return None
        seen = seen | {module}
        if name in names.defined:
            return Definition(module, name, tuple(names.defined[name]))
        if name in names.imported:
            origin, original = names.imported[name]
            if not original:
                return self._module(origin)
            found = self._global(origin, original, seen) or self._module(f"{origin}.{original}")
            # What comes from another package is only known to be there.
            elsewhere = origin.partition(".")[0] != "vllm"
            return Definition(module, name, ()) if found is None and elsewhere else found
        for star in names.stars:
            found = self._global(star, name, seen)
            if found is not None:
                return found
        return self._module(f"{module}.{name}")

    def _line(self, cls: Definition) -> list[Definition]:
        """A class and vLLM's classes that it derives from, each once, the nearest first."""
        if cls.place not in self._lines and cls.cls is not None:
            bases = (self._annotated(cls.module, base) for base in cls.cls.bases)
            lines = [self._line(base) for base in bases if base is not None]
            every = [cls, *itertools.chain.from_iterable(lines)]
            self._lines[cls.place] = list({one.place: one for one in every}.values())
        return self._lines.get(cls.place, [])

    def _type(self, owner: Definition) -> Definition | None:
        """The class of a value, or the class itself."""
        if owner.cls is not None:
            return owner
        for node in owner.nodes:
            annotation: ast.expr | None = None
            if isinstance(node, Function):
                annotation = node.returns
            elif isinstance(node, ast.AnnAssign):
                annotation = node.annotation
            elif isinstance(node, ast.Assign) and (member_of := self._enumeration(owner)):
                return member_of
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                annotation = node.value.func
            found = self._annotated(owner.module, annotation)
            if found is not None:
                return found
        return None

    def _enumeration(self, member: Definition) -> Definition | None:
        """The enumeration that something is a member of."""
        cls = self.find(f"{member.module}:{member.name.rpartition('.')[0]}")
        if cls is None or cls.cls is None:
            return None
        bases = [ast.unparse(base) for one in self._line(cls) if one.cls for base in one.cls.bases]
        return cls if any(base.endswith(("Enum", "Flag")) for base in bases) else None

    def _class_of_result(self, called: Definition) -> Definition | None:
        if called.cls is not None:
            return called
        functions = [node for node in called.nodes if isinstance(node, Function)]
        return self._type(called) if functions else None

    def _annotated(self, module: str, node: ast.expr | None) -> Definition | None:
        """The class of vLLM that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotated(module, ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._annotated(module, node.left) or self._annotated(module, node.right)
        if isinstance(node, ast.Subscript):
            generic = ast.unparse(node.value).rpartition(".")[2]
            inside = generic in ("Optional", "type", "Annotated", "ClassVar", "Final")
            return self._annotated(module, node.slice if inside else node.value)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        found: Definition | None = self._module(module)
        for name in ast.unparse(node).split("."):
            found = None if found is None else self._attribute(found, name)
        return found if found is not None and found.cls is not None else None

    def _constructor(self, cls: Definition) -> Definition | None:
        """``__init__`` of a class, or the fields that take its place."""
        if cls.cls is None:
            return None
        init = self._attribute(cls, "__init__")
        if init is not None:
            return init
        fields = [
            node
            for one in reversed(self._line(cls))
            for node in (one.cls.body if one.cls is not None else ())
            if isinstance(node, ast.AnnAssign)
        ]
        return Definition(cls.module, f"{cls.name}()", tuple(fields))
