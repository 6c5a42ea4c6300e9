"""What tells whether a definition has changed: its signature, and a hash of its body."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_dllm.compat.definitions import Definition, Definitions
from vllm_dllm.compat.scan import Scan

# What was recorded of the vLLM that this package is tested with.
RECORD = Path(__file__).with_name("tested.json")
_HASH_LENGTH = 12
# Fields of the syntax tree that say nothing, or that one version of Python has and another lacks.
_IGNORED = ("ctx", "kind", "type_comment", "type_params")


@dataclass(frozen=True)
class Fingerprint:
    """A definition in short.

    Attributes:
        place: where it is defined.
        signature: how it is called, for a person to read; of a value its annotation.
        body: a hash of the rest, without docstrings and comments.
    """

    place: str
    signature: str
    body: str


class Thing(NamedTuple):
    """Something that we rely on, and the paths by which we reach it (see `values.Vllm`)."""

    fingerprint: Fingerprint
    paths: tuple[str, ...]


def fingerprint(definition: Definition) -> Fingerprint:
    """The fingerprint of a definition."""
    signatures, bodies = [], []
    for node in definition.nodes:
        signature, body = _parts(node)
        if signature not in signatures:
            signatures.append(signature)
        bodies += body
    text = "".join(map(canonical, bodies))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH] if text else ""
    return Fingerprint(definition.place, "; ".join(filter(None, signatures)), digest)


def _parts(node: ast.stmt) -> tuple[str, list[ast.AST]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        arguments = ast.unparse(node.args)
        return f"{decorators}{prefix}def {node.name}({arguments}){returns}", [
            *_without_strings(node.body)
        ]
    if isinstance(node, ast.ClassDef):
        # What we use of a class has fingerprints of its own.
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})", []
    if isinstance(node, ast.AnnAssign) and not node.simple:
        return "", []  # an attribute that methods set: only that there is one
    if isinstance(node, ast.AnnAssign):
        annotation = ast.unparse(node.annotation)
        name = ast.unparse(node.target)
        return f"{name}: {annotation}", [node.value] if node.value else []
    return "", [node.value] if isinstance(node, ast.Assign) else [node]


def canonical(node: Any) -> str:
    """A syntax tree as text: without places in the file, docstrings and what Python adds to it.

    `ast.dump` and `ast.unparse` give other texts in other versions of Python.
    """
    if isinstance(node, list):
        return "[" + ",".join(map(canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = _without_strings(value)
        if name not in _IGNORED and value not in (None, []):
            fields.append(f"{name}={canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _without_strings(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if not _is_string(node)]


def _is_string(node: ast.AST) -> bool:
    """Whether a statement is only a string: a docstring, or the description of a field."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def relied_on(scan: Scan, vllm: Definitions) -> set[str]:
    """The paths of everything that we use of a vLLM, with all that our classes inherit from it."""
    classes = [cls for cls, uses in scan.uses.items() if any(u.how == "subclassed" for u in uses)]
    return {*scan.uses, *(f"{cls}.{name}" for cls in classes for name in vllm.members(cls))}


def take(paths: Iterable[str], vllm: Definitions) -> list[Thing]:
    """The things that paths lead to in a vLLM; a path that leads nowhere is left out."""
    found: dict[Fingerprint, list[str]] = {}
    for path in sorted(paths):
        definition = vllm.find(path)
        if definition is not None:
            found.setdefault(fingerprint(definition), []).append(path)
    things = [Thing(one, tuple(paths)) for one, paths in found.items()]
    return sorted(things, key=lambda thing: thing.fingerprint.place)


def write(things: Iterable[Thing], version: str | None, file: Path) -> None:
    """Write a record, with one thing to a line."""
    lines = []
    for one, paths in things:
        shorter = [] if paths == (one.place,) else [paths]
        lines.append(json.dumps([one.place, one.signature, one.body, *shorter]))
    text = ",\n".join(lines)
    file.write_text(f'{{"vllm": {json.dumps(version)}, "things": [\n{text}\n]}}\n')


def read(file: Path) -> tuple[str, list[Thing]]:
    """The version of vLLM that a record was made of, and what was recorded."""
    record = json.loads(file.read_text())
    things = []
    for place, signature, body, *paths in record["things"]:
        one = Fingerprint(place, signature, body)
        things.append(Thing(one, tuple(paths[0]) if paths else (place,)))
    return record["vllm"], things
