"""Who may import whom. The table is the architecture; docs/structure.md says it in words."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.commands import run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_dllm"
STANDARD = set(sys.stdlib_module_names)

# Room (longest match wins) -> what it may import beside the standard library, itself, and
# `vllm_dllm.ranges`, which imports nothing: the schema of parameters, and the error that names one.
MAY_IMPORT: dict[str, set[str]] = {
    "vllm_dllm": set(),
    "vllm_dllm.ranges": set(),
    # Pure: no vLLM below this line and above the next comment.
    "vllm_dllm.settings": {"vllm_dllm.decoding"},
    "vllm_dllm.settings.server": set(),
    # Both draw the same noise in their kernels.
    "vllm_dllm.ops": {"torch", "triton", "canvas_grammar.decoding.noise_triton"},
    "vllm_dllm.decoding": {"torch", "vllm_dllm.ops"},
    # What happened in the steps of an answer.
    "vllm_dllm.tracing": {"numpy", "vllm_dllm.settings", "vllm_dllm.vllm_seams.channels"},
    # Counters by decoding algorithm.
    "vllm_dllm.metrics": {
        "vllm", "vllm_dllm.settings.server", "vllm_dllm.vllm_seams.channels",
    },
    # Between vLLM and the pure rooms.
    "vllm_dllm.checkpoints": {
        "torch", "transformers", "safetensors", "vllm", "vllm_dllm.ops", "vllm_dllm.settings",
        # Imported where weights are updated on a CPU.
        "vllm_cpu_v2.packed_layers",
    },
    "vllm_dllm.attention": {"torch", "vllm", "vllm_dllm.ops"},
    "vllm_dllm.engine": {
        "torch", "numpy", "vllm", "canvas_grammar", "vllm_dllm.attention",
        "vllm_dllm.decoding", "vllm_dllm.ops", "vllm_dllm.settings",
        # Where the model state meets vLLM's runner.
        "vllm_dllm.vllm_seams.runner", "vllm_dllm.vllm_seams.channels",
    },
    # vLLM's factory imports it by the name that `startup.kv_transfer` gives it.
    "vllm_dllm.kv_transfer": {"torch", "numpy", "safetensors", "vllm"},
    "vllm_dllm.startup": {
        "torch", "vllm", "vllm_dllm.checkpoints", "vllm_dllm.settings",
    },
    "vllm_dllm.families": {
        "torch", "numpy", "transformers", "huggingface_hub", "vllm", "vllm_dllm.attention",
        "vllm_dllm.checkpoints", "vllm_dllm.decoding", "vllm_dllm.ops", "vllm_dllm.settings",
        "vllm_dllm.startup", "vllm_dllm.tracing", "vllm_dllm.engine",
        "vllm_dllm.vllm_seams.channels",
    },
    "vllm_dllm.families.registry": {
        "vllm", "vllm_dllm.families.base", "vllm_dllm.settings.server",
    },
    # Pictures.
    "vllm_dllm.families.vision": {
        "torch", "numpy", "transformers", "PIL", "cv2", "vllm", "vllm_dllm.checkpoints",
        "vllm_dllm.engine", "vllm_dllm.families",
    },
    "vllm_dllm.frontend": {
        "vllm", "canvas_grammar", "vllm_dllm.decoding.base", "vllm_dllm.settings",
        "vllm_dllm.tracing", "vllm_dllm.vllm_seams.channels",
    },
    "vllm_dllm.frontend.http_server": {"starlette", "vllm", "vllm_dllm.frontend"},
    "vllm_dllm.vllm_seams": {
        "vllm", "vllm_dllm.families.registry", "vllm_dllm.frontend", "vllm_dllm.metrics",
        "vllm_dllm.settings", "vllm_dllm.startup",
    },
    "vllm_dllm.vllm_seams.wrapping": set(),
    # Fields of vLLM's messages that carry something of ours.
    "vllm_dllm.vllm_seams.channels": {"torch", "numpy", "vllm"},
    "vllm_dllm.vllm_seams.runner": {"vllm_dllm.vllm_seams.wrapping"},
    # The front doors.
    "vllm_dllm.plugin": {"vllm_dllm.vllm_seams"},
    "vllm_dllm.cli": {
        "vllm_dllm", "vllm_dllm.commands",
        "vllm_dllm.selftest.command", "vllm_dllm.viewer",
    },
    "vllm_dllm.viewer": {"vllm_dllm.commands", "rich"},
    # Runs in vLLM's server, which imports it by the name that users pass to ``--middleware``.
    "vllm_dllm.viewer.live": {
        "starlette", "vllm", "vllm_dllm.frontend", "vllm_dllm.tracing.live", "vllm_dllm.viewer",
    },
    # vLLM and what imports it are imported inside functions: `demo` and `watch` do without.
    "vllm_dllm.commands": {
        "vllm", "vllm_dllm", "vllm_cpu_v2.plugin", "vllm_dllm.checkpoints.memory",
        "vllm_dllm.families.registry",
        "vllm_dllm.families.config_fields", "vllm_dllm.plugin", "vllm_dllm.settings",
        "vllm_dllm.vllm_seams.registration", "vllm_dllm.vllm_seams.versions",
        "rich", "yaml",
    },
    # Serves as users do: from outside, but for the names of what an engine chose.
    "vllm_dllm.selftest": {
        "torch", "vllm", "vllm_dllm", "vllm_dllm.attention", "vllm_dllm.plugin",
    },
    # A model without its backbone, to time what runs beside one.
    "vllm_dllm.selftest.steps": {
        "vllm_dllm.selftest.steps",
        "torch", "numpy", "vllm", "canvas_grammar", "vllm_dllm.engine", "vllm_dllm.ops",
        "vllm_dllm.settings", "vllm_dllm.families.diffusion_gemma.self_conditioning",
    },
}  # fmt: skip
# Distribution beside the plugin -> what it may import beside the standard library and itself.
BESIDE: dict[str, set[str]] = {
    "packages/canvas-grammar/canvas_grammar": {
        "torch", "triton", "numba", "numpy", "outlines_core", "lark",
        "jsonschema_specifications", "referencing",
    },
    "packages/vllm-cpu-v2/vllm_cpu_v2": {
        "torch", "numba", "llvmlite", "numpy", "vllm", "compressed_tensors",
    },
}  # fmt: skip
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


def imports(path: Path, known: Collection[str]) -> list[str]:
    """The modules that a file imports anywhere, inside functions and for type checkers, too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            # `from vllm_dllm.families import registry` imports a module, not a name.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            whole = node.module == "vllm_dllm"
            found += [name if name in known or whole else str(node.module) for name in names]
    return found


def test_rooms_keep_to_their_imports() -> None:
    found = []
    known = modules(PACKAGE)
    for module, path in known.items():
        room = room_of(module)
        for name in imports(path, known):
            own = (room != "vllm_dllm" and within(name, room)) or name == "vllm_dllm.ranges"
            if name.split(".")[0] in STANDARD or own:
                continue
            if name == "vllm_dllm.__version__" and "vllm_dllm" in MAY_IMPORT[room]:
                continue
            if not any(within(name, allowed) for allowed in MAY_IMPORT[room] - {"vllm_dllm"}):
                found.append(f"{module} imports {name}")
    assert found == []


@pytest.mark.parametrize("folder", BESIDE)
def test_distributions_beside_the_plugin_stand_alone(folder: str) -> None:
    package = ROOT / folder
    known = modules(package)
    foreign = {
        name.split(".")[0] for path in known.values() for name in imports(path, known)
    } - STANDARD
    assert foreign <= BESIDE[folder] | {package.name}


def test_importing_the_package_is_free() -> None:
    """`vllm_dllm` is imported by tools that must not pay for torch or vLLM."""
    modules = "sys, vllm_dllm, vllm_dllm.settings.server"
    code = f"import {modules}; print({{'torch', 'vllm'}} & set(sys.modules))"
    # -S: site's .pth files belong to the installation, not to the package.
    assert run(sys.executable, "-S", "-c", code, cwd=ROOT).stdout.strip() == "set()"


def test_only_one_module_knows_vllm_versions() -> None:
    found = [
        f"{module}: {node.value!r}"
        for module, path in modules(PACKAGE).items()
        if module not in ("vllm_dllm.vllm_seams.versions", "vllm_dllm")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and VERSION.search(node.value)
        and "vllm" in node.value.lower()
    ]
    assert found == []
