"""Which files have more than 800 lines and which functions more than 80, longest first.

.venv/bin/python scripts/long_code.py [FOLDER ...]

A report, not a check: the exit status is always 0. A file or function that is longer says why in
its docstring or in a comment. Without FOLDER, the code that users install is read.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = (
    "vllm_dllm",
    "packages/canvas-grammar/canvas_grammar",
    "packages/vllm-cpu-v2/vllm_cpu_v2",
)
FILE_LINES, FUNCTION_LINES = 800, 80


def long_parts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and names of a file and of its functions, as far as they are too long."""
    source = path.read_text("utf-8")
    name = path.relative_to(ROOT)
    if (lines := len(source.splitlines())) > FILE_LINES:
        yield lines, str(name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield lines, f"{name}:{node.lineno} {node.name}"


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", default=INSTALLED)
    files = [path for each in parser.parse_args().folders for path in (ROOT / each).rglob("*.py")]
    for lines, name in sorted((part for path in files for part in long_parts(path)), reverse=True):
        print(f"{lines:5} {name}")


if __name__ == "__main__":
    main()
