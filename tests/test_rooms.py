"""Who may import whom. The table is the architecture; docs/structure.md says it in words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_dllm"
STANDARD = set(sys.stdlib_module_names)

# Room (longest match wins) -> what it may import beside the standard library and itself.
MAY_IMPORT: dict[str, set[str]] = {
    "vllm_dllm": set(),
    "vllm_dllm.settings.ranges": set(),
    "vllm_dllm.settings.file": {"yaml", "vllm_dllm.settings.ranges"},
    "vllm_dllm.settings.parsing": {"vllm_dllm.settings.ranges", "vllm_dllm.settings.file"},
    "vllm_dllm.ops": {"torch", "triton", "numpy"},
    "vllm_dllm.decoding": {"torch", "numpy", "vllm_dllm.ops", "vllm_dllm.settings.ranges"},
    "vllm_dllm.constraints": {"torch", "numpy", "outlines_core", "vllm_dllm.ops"},
    "vllm_dllm.models": {
        "torch", "transformers", "safetensors", "vllm", "vllm_dllm.settings.parsing", "vllm_dllm.ops",
        "vllm_dllm.settings.ranges",
    },
    "vllm_dllm.engine": {
        "torch", "numpy", "vllm", "vllm_dllm.settings.parsing", "vllm_dllm.decoding", "vllm_dllm.ops",
        "vllm_dllm.models", "vllm_dllm.cpu", "vllm_dllm.settings.ranges", "vllm_dllm.constraints",
    },
    "vllm_dllm.cpu": {"torch", "numpy", "vllm", "compressed_tensors"},
    "vllm_dllm.vllm_patches.compat": {
        "transformers", "vllm", "vllm_dllm.settings.parsing", "vllm_dllm.engine", "vllm_dllm.models",
    },
    "vllm_dllm.plugin": {"vllm_dllm.vllm_patches.compat", "vllm_dllm.cpu"},
    "vllm_dllm.startup.diagnosis": {"vllm", "vllm_dllm.vllm_patches.compat", "vllm_dllm.engine"},
    "vllm_dllm.cli": {
        "vllm_dllm", "vllm_dllm.vllm_patches.compat", "vllm_dllm.cpu", "vllm_dllm.plugin", "vllm_dllm.startup.diagnosis",
    },
}  # fmt: skip
# The one import that points against the arrows: a model class names its model state, which
# vLLM asks it for. It is inside a function, so importing the model does not import the engine.
LAZILY = {
    (f"vllm_dllm.models.{model}", "vllm_dllm.worker.model_state")
    for model in ("llada2", "diffusion_gemma")
}
VERSION = re.compile(r"\b0\.\d{2}(\.\d+)?\b")


def modules(package: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }


def room_of(module: str) -> str:
    return max((r for r in MAY_IMPORT if within(module, r)), key=len)


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, whether the import is at module level) for each import of a file."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            # `from vllm_dllm import compat` imports a module, not a name.
            names = [
                f"{node.module}.{alias.name}" if node.module == "vllm_dllm" else str(node.module)
                for alias in node.names
            ]
        found += [(name, id(node) in top) for name in names]
    return found


def violations(package: Path) -> list[str]:
    found = []
    for module, path in modules(package).items():
        room = room_of(module)
        for name, at_top in imports(path):
            if name.split(".")[0] in STANDARD or (within(name, room) and room != "vllm_dllm"):
                continue
            if not at_top and (module, name) in LAZILY:
                continue
            if name == "vllm_dllm.__version__" and "vllm_dllm" in MAY_IMPORT[room]:
                continue
            if not any(within(name, allowed) for allowed in MAY_IMPORT[room] - {"vllm_dllm"}):
                found.append(f"{module} imports {name}")
    return found


def test_rooms_keep_to_their_imports() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("decoding/bad.py", "import vllm", "vllm_dllm.decoding.bad imports vllm"),
        ("ops/bad.py", "from vllm.config import X", "vllm_dllm.ops.bad imports vllm.config"),
        (
            "config.py",
            "def f():\n    import torch",
            "vllm_dllm.settings.parsing imports torch",
        ),
        (
            "cpu/bad.py",
            "from vllm_dllm.engine import sampler",
            "vllm_dllm.cpu.bad imports vllm_dllm.engine",
        ),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    planted = tmp_path / "vllm_dllm" / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(line + "\n")
    assert violations(tmp_path / "vllm_dllm") == [complaint]


def test_importing_the_package_is_free() -> None:
    """`vllm_dllm` is imported by tools that must not pay for torch or vLLM."""
    code = "import sys, vllm_dllm, vllm_dllm.settings.parsing; print({'torch', 'vllm'} & set(sys.modules))"
    # -S: site's .pth files belong to the installation, not to the package.
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


def test_only_one_module_knows_vllm_versions() -> None:
    found = [
        f"{module}: {node.value!r}"
        for module, path in modules(PACKAGE).items()
        if module not in ("vllm_dllm.vllm_patches.versions", "vllm_dllm")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and VERSION.search(node.value)
        and "vllm" in node.value.lower()
    ]
    assert found == []
