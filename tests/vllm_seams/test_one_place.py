"""vLLM is changed from the outside in one room; what is changed elsewhere is listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_dllm"
ROOM = PACKAGE / "vllm_seams"

# Where something of vLLM is changed outside of the room, and why there.
ALLOWED = {
    "frontend/admission.py": "fills an object of our own subclass of sampling parameters",
    "viewer/live.py": "leaves its traces with the output processor of one server",
    "commands/installation.py": "loads plugins one at a time, to name the one that fails",
}


def changes(source: str) -> list[str]:
    """The lines of a file that may change an object of somebody else.

    Found are ``setattr``, ``functools.wraps``, ``__wrapped__``, the string ``__dict__`` (a
    module's names), and assignments to an attribute or an item of what was imported from vLLM or
    is in ``sys.modules``.
    """
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm")
        or (isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == "vllm")
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        named = {
            ast.Name: lambda node: node.id in ("setattr", "wraps"),
            ast.Attribute: lambda node: node.attr in ("wraps", "__wrapped__"),
            ast.Constant: lambda node: node.value in ("__wrapped__", "__dict__"),
        }.get(type(node))
        if named is not None and named(node):
            found.append(node.lineno)
        for target in _targets(node):
            root = _root(target)
            if root is not None and (root in imported or "sys.modules" in ast.unparse(target)):
                found.append(target.lineno)
    lines = source.splitlines()
    return [lines[number - 1].strip() for number in sorted(set(found))]


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _root(target: ast.expr) -> str | None:
    """The name that an attribute or an item is reached from; None of a plain name."""
    if isinstance(target, ast.Name):
        return None
    while isinstance(target, (ast.Attribute, ast.Subscript, ast.Call)):
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else None


def test_vllm_is_changed_in_one_room() -> None:
    found = {
        str(path.relative_to(PACKAGE)): changes(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if ROOM not in path.parents
    }
    found = {name: lines for name, lines in found.items() if lines}
    unknown = {name: lines for name, lines in found.items() if name not in ALLOWED}
    assert unknown == {}, "wrap it with vllm_seams.wrapping, in vllm_seams"
    assert set(ALLOWED) == set(found), "an exception that is no longer needed"


def test_the_room_wraps_with_one_helper() -> None:
    """Beside `wrapping`: tables, a default of tool parsers, and attributes of single objects."""
    found = {
        path.name: changes(path.read_text())
        for path in ROOM.glob("*.py")
        if path.name != "wrapping.py"
    }
    assert {name: lines for name, lines in found.items() if lines} == {
        "registration.py": [
            "_CONFIG_REGISTRY[model_type] = name  # type: ignore[assignment]",
            'configs._CLASS_TO_MODULE[name] = f"vllm_dllm.families.{folder}.hf_config"',
            "MODELS_CONFIG_MAP[architecture] = "
            'type("EngineConfig", (VerifyAndUpdateConfig,), hooks)',
        ],
        "request_entry.py": ["setattr(self, FRONT_END, front_end)"],
        # vLLM's own attribute for this, on its class of tool parsers.
        "http_endpoints.py": ["ToolParser.default_tool_strict_level = ToolStrictLevel.PARAMETER"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.config import VllmConfig\nVllmConfig.choice = 3",
        "import vllm.envs\nvllm.envs.NAME = 3",
        "def f():\n    from vllm import config as c\n    c.VllmConfig.choice = property(f)",
        "from vllm.config import TABLE\nTABLE['a'] = 3",
        "import sys\nsys.modules['vllm.envs'].NAME = 3",
        "setattr(x, 'name', 3)",
        "import functools\n@functools.wraps(f)\ndef g(): ...",
        "from functools import wraps",
        "vars_of_module = getattr(module, '__dict__')",
    ],
)
def test_a_change_is_found(source: str) -> None:
    found = changes(source + ("\nwraps(f)" if "import wraps" in source else ""))
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.config import VllmConfig\nconfig = VllmConfig()\nconfig.choice = 3",
        "from vllm.config import VllmConfig\nVllmConfig = None",
        "object.__setattr__(self, 'name', 3)",
        "class A:\n    def __setattr__(self, key, value): super().__setattr__(key, value)",
    ],
)
def test_an_innocent_line_is_not(source: str) -> None:
    assert changes(source) == []
