"""What our source uses of vLLM, found by reading it.

Every module is read statement by statement with what its names may be: imports, lookups of loaded
modules, annotations, constants. A call of a function of ours is followed with its arguments, and a
loop over known items is read for each of them, so that a wrapper whose target is handed from one
function to the next is found.
"""

from __future__ import annotations

import ast
from collections import ChainMap, defaultdict
from pathlib import Path
from typing import NamedTuple

from vllm_dllm.compat.statements import Statements
from vllm_dllm.compat.values import (
    NOTHING,
    Bound,
    Class,
    Function,
    Instance,
    Module,
    Scope,
    Values,
    Vllm,
    tells_of_vllm,
    texts,
)

# Where the one helper is that wraps functions of vLLM.
WRAPPING = ("vllm_dllm.vllm_patches.wrapping", "wrap")
# How many calls deep arguments are followed.
DEPTH = 8


class Use(NamedTuple):
    """A place where we use something of vLLM's, and how: ``wrapped``, ``overridden``, ..."""

    file: str
    line: int
    how: str


class Scan:
    """Reads a package of ours.

    Attributes:
        uses: by path (see `values.Vllm`), where we use it.
        unknown_wraps: where something is wrapped of which reading does not tell what it is.
    """

    def __init__(self, package: Path) -> None:
        """Read all modules of the package in this folder."""
        self.uses: dict[str, set[Use]] = defaultdict(set)
        self._wraps: dict[tuple[str, int], bool] = {}
        self.modules: dict[str, Module] = {}
        self._done: dict[object, Values] = {}
        self._scopes: list[Scope] = []
        self._depth = 0
        for path in sorted(package.rglob("*.py")):
            relative = path.relative_to(package.parent)
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text())
            self.modules[name] = Module(name, relative.as_posix(), tree, ChainMap())
        readers = {name: Statements(self, module) for name, module in self.modules.items()}
        self._readers = readers
        near = self._near_vllm()
        # The second time, what instances of our classes hold is known from the first.
        for _ in range(2):
            self._done.clear()
            for reader in readers.values():
                reader.read_module()
            for name in near:
                readers[name].read_functions()

    def _near_vllm(self) -> list[str]:
        """The modules that import vLLM or what wraps its functions, or one of ours that does.

        In any other, something of vLLM's is only what a function is given by these; such a function
        is read when it is called.
        """
        imports = {name: imported(module.tree) for name, module in self.modules.items()}
        near = {name for name, found in imports.items() if "vllm" in found} | {WRAPPING[0]}
        while more := {name for name in imports.keys() - near if imports[name] & near}:
            near |= more
        return sorted(near & imports.keys())

    @property
    def unknown_wraps(self) -> list[str]:
        """``file:line`` of each wrapper of something unknown."""
        return [f"{file}:{line}" for (file, line), known in self._wraps.items() if not known]

    def use(self, value: Vllm, how: str, module: Module, line: int) -> None:
        """Note a use."""
        self.uses[value.path].add(Use(module.path, line, how))

    def global_of(self, module: str, name: str) -> Values:
        """What a global of a module of ours may be."""
        found = self.modules.get(module)
        if found is not None and name in found.scope:
            return self._readers[module].expressions.resolved(found.scope[name])
        submodule = self.modules.get(f"{module}.{name}")
        return NOTHING if submodule is None else frozenset({submodule})

    def is_wrap(self, function: Function) -> bool:
        """Whether a function is the helper that wraps functions of vLLM."""
        return (function.module.name, function.node.name) == WRAPPING

    def wrap(self, args: list[Values], module: Module, node: ast.Call) -> None:
        """Note what a call of the helper wraps, and read its wrapper with the instance known."""
        owners = [owner for owner in args[0] if isinstance(owner, Vllm)]
        place = (module.path, node.lineno)
        self._wraps[place] = self._wraps.get(place, False) or bool(owners and texts(args[1]))
        for owner in owners:
            for name in texts(args[1]):
                original = owner.attribute(name)
                self.use(original, "wrapped", module, node.lineno)
                for decorator in args[2]:
                    if isinstance(decorator, Function):
                        self._read(
                            decorator,
                            {first_parameter(decorator): frozenset({original})},
                            frozenset({owner.called()}) if ":" in owner.path else NOTHING,
                        )

    def construct(self, cls: Class, args: list[Values], keywords: dict[str, Values]) -> Values:
        """An instance of a class of ours; its fields are the arguments where it only holds them."""
        if any("__init__" in one.methods for one in cls.ours()):
            self.call(Bound(_constructor(cls), frozenset({Instance(cls)})), args, keywords)
            return frozenset({Instance(cls)})
        fields = [
            node.target.id
            for one in reversed(cls.ours())
            for node in one.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        given = dict(zip(fields, args, strict=False)) | keywords
        return frozenset({Instance(cls, tuple(sorted(given.items())))})

    def call(
        self, called: Function | Bound, args: list[Values], keywords: dict[str, Values]
    ) -> Values:
        """What a call of a function of ours may give; its body is read with these arguments."""
        function = called.function if isinstance(called, Bound) else called
        names = [arg.arg for arg in (*function.node.args.posonlyargs, *function.node.args.args)]
        given = [called.instance, *args] if isinstance(called, Bound) else args
        known = dict(zip(names, given, strict=False)) | keywords
        if self._depth >= DEPTH or not any(map(tells_of_vllm, known.values())):
            known = {}
        return self._read(function, {k: v for k, v in known.items() if v}, NOTHING)

    def read(self, function: Function, known: dict[str, Values] | None = None) -> None:
        """Read a function's body, with what is known of its parameters."""
        self._read(function, known or {}, NOTHING)

    def _read(self, function: Function, known: dict[str, Values], inner: Values) -> Values:
        """Read a function's body.

        Args:
            function: of ours.
            known: what its parameters may be; of others their annotations tell it.
            inner: what the first parameter of the functions defined in it may be.
        """
        key = (function.node, id(function.scope), frozenset(known.items()), inner)
        if key not in self._done:
            self._scopes.append(function.scope)  # or another scope might get its id
            self._done[key] = NOTHING  # for a function that calls itself
            reader = self._readers[function.module.name]
            self._depth += 1
            self._done[key] = reader.read_body(function, known, inner)
            self._depth -= 1
        return self._done[key]


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports anywhere; of another package only the package's name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("vllm."):
            found.add("vllm")  # a module that is looked up by its name
    return {name if name.startswith("vllm_dllm") else name.partition(".")[0] for name in found}


def first_parameter(function: Function) -> str:
    """The name of a function's first parameter; empty if it has none."""
    parameters = [*function.node.args.posonlyargs, *function.node.args.args]
    return parameters[0].arg if parameters else ""


def _constructor(cls: Class) -> Function:
    return next(one.methods["__init__"] for one in cls.ours() if "__init__" in one.methods)
