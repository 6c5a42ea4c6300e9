"""Names that a supported version of vLLM has moved are taken from where all versions have them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_dllm"
# What 0.32 has in two places and 0.33 no longer has in this one.
GONE = {("vllm.utils.torch_utils", "is_quantized_kv_cache")}


def test_nothing_is_imported_from_where_a_later_vllm_has_it_no_longer() -> None:
    found = {
        (node.module, alias.name): path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: found[name] for name in GONE & found.keys()} == {}
