"""Tests and benchmarks share `tests.support` rather than import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT

# Tests of a benchmark's own logic, which is what they import.
TESTS_OF_BENCHMARKS = {
    "tests/benchmarks/geometries.py",
    "tests/checkpoints/test_published_names.py",
    "tests/serving/engines/test_memory.py",
    "tests/serving/reliability/test_soak.py",
    "tests/benchmarks/test_memory.py",
    "tests/benchmarks/test_models.py",
    "tests/benchmarks/test_recovery.py",
    "tests/benchmarks/test_report.py",
    "tests/benchmarks/test_sdar.py",
    "tests/test_docs.py",
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_only_the_shared_package_of_tests_is_imported(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name in imports(path)
        if name.split(".")[0] == "tests" and not name.startswith("tests.support")
    ]
    assert found == []


def test_the_shared_package_imports_neither_tests_nor_benchmarks() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("tests/support")
        for name in imports(path)
        if name.split(".")[0] == "benchmarks"
        or (name.split(".")[0] == "tests" and not name.startswith("tests.support"))
    ]
    assert found == []


def test_only_tests_of_benchmarks_import_them() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in files("tests")
        for name in imports(path)
        if name.split(".")[0] == "benchmarks"
    }
    assert importers == TESTS_OF_BENCHMARKS
