"""No file and no function is too long to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT

FOLDERS = ("vllm_dllm", "tests", "benchmarks", "examples", "scripts", "packaging")
FILE_LINES = 300
FUNCTION_LINES = 60  # from the line of its `def` to its last

# "path" or "path::function" -> why it may be longer. An entry that is not needed any more is an
# error.
EXCEPTIONS: dict[str, str] = {
    "vllm_dllm/ops/attention/kernel_triton.py::attention_kernel": (
        "a Triton kernel is one program, and the loop over keys shares a dozen tensors with the "
        "rest of it"
    ),
}


def too_long(root: Path) -> Iterator[tuple[str, str]]:
    """(entry, what is wrong) of each Python file and function under `root` that exceeds a limit."""
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        lines = len(text.splitlines())
        if lines > FILE_LINES:
            yield name, f"{name} has {lines} lines, more than {FILE_LINES}"
        for function in functions(ast.parse(text)):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES:
                entry = f"{name}::{function.name}"
                yield entry, f"{entry} has {lines} lines, more than {FUNCTION_LINES}"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_nothing_is_too_long() -> None:
    assert [problem for entry, problem in too_long(ROOT) if entry not in EXCEPTIONS] == []


def test_every_exception_is_needed() -> None:
    assert EXCEPTIONS.keys() - {entry for entry, _ in too_long(ROOT)} == set()


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("x = 1\n" * 300, []),
        ("x = 1\n" * 301, ["tests/planted.py"]),
        ("@decorated\ndef f():\n" + "    x = 1\n" * 59, []),
        ("def f():\n" + "    x = 1\n" * 60, ["tests/planted.py::f"]),
        ("class C:\n    async def f():\n" + "        x = 1\n" * 60, ["tests/planted.py::f"]),
    ],
)
def test_a_planted_excess_is_found(tmp_path: Path, text: str, entries: list[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "planted.py").write_text(text)
    assert [entry for entry, _ in too_long(tmp_path)] == entries
