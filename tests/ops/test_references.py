"""The plain references are for tests and benchmarks: the package itself imports none of them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_dllm"
REFERENCE = "vllm_dllm.ops.attention.reference"


def imported(path: Path) -> set[str]:
    """Full names of the modules, and of what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_module_imports_the_attention_reference() -> None:
    assert (PACKAGE / "ops" / "attention" / "reference.py").is_file()
    importers = [path.name for path in PACKAGE.rglob("*.py") if REFERENCE in imported(path)]
    assert importers == []
