"""vLLM is changed from the outside in one room; what is changed elsewhere is listed here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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

    Found are ``setattr``, ``wraps``, ``__wrapped__``, and assignments to an attribute or an item of
    what was imported from vLLM or is in ``sys.modules``.
    """
    tree = ast.parse(source)
    imported = {"sys"} | {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and (getattr(node, "module", None) or node.names[0].name).split(".")[0] == "vllm"
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        named = getattr(node, "id", None) or getattr(node, "attr", None)
        if named in ("setattr", "wraps", "__wrapped__"):
            found.add(node.lineno)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in (
            targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ()
        ):
            root, dot, _ = re.split(r"([.[]|$)", ast.unparse(target), maxsplit=1)
            if dot and root in imported:
                found.add(target.lineno)
    lines = source.splitlines()
    return [lines[number - 1].strip() for number in sorted(found)]


def test_vllm_is_changed_in_one_room() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if ROOM not in path.parents and (lines := changes(path.read_text()))
    }
    unknown = {name: lines for name, lines in found.items() if name not in ALLOWED}
    assert unknown == {}, "wrap it with vllm_seams.wrapping, in vllm_seams"
    assert set(ALLOWED) == set(found), "an exception that is no longer needed"
