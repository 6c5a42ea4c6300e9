"""Tests, benchmarks and examples share `tests.support`, which imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import ROOT


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(file, name) of everything that the files of a folder import."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((str(path), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield str(path), node.module


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("benchmarks", ("tests",)),
        ("examples", ("tests",)),
        ("tests/support", ("tests", "benchmarks")),
        ("tests/serving/servers", ("benchmarks",)),
    ],
)
def test_only_the_shared_package_is_imported(folder: str, others: tuple[str, ...]) -> None:
    found = [
        f"{path} imports {name}"
        for path, name in imports(folder)
        if name.split(".")[0] in others and not f"{name}.".startswith("tests.support.")
    ]
    assert found == []
