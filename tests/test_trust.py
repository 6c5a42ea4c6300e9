"""What the package never does, and the bounds that `SECURITY.md` promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_dllm.ranges import MAX_STEPS, SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import MAX_CANVAS, DllmSettings

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_dllm"
SERVED = Served("uniform", "EntropyBound", DllmSettings())

# Code or objects out of data. `compile` is `torch.compile` or nothing.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# yaml.load and torch.load are judged by their arguments, below.
UNSAFE = {
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all"),
    *("os.system", "os.popen", "numpy.load"),
}


def dangers(source: str) -> list[str]:
    """What a file does of the above, with the line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = (
            _import(node)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            else _call(node)
            if isinstance(node, ast.Call)
            else _remote_code(node)
        )
        if what:
            found.append(f"{getattr(node, 'lineno', 0)}: {what}")
    return found


def _import(node: ast.Import | ast.ImportFrom) -> str | None:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or "")
    return next((name for name in names if name.split(".")[0] in MODULES), None)


def _call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if name in BUILTINS or name in UNSAFE:
        return name
    if name == "yaml.load" and given.get("Loader") != "yaml.SafeLoader":
        return "yaml.load without a safe loader"
    if name == "torch.load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if name == "np.load" and given.get("allow_pickle") != "False":
        return "np.load without allow_pickle=False"
    if "trust_remote_code" in given or "shell" in given:
        return f"{name} with trust_remote_code or shell"
    return None


def _remote_code(node: ast.AST) -> str | None:
    """Written to: ``x.trust_remote_code = ...`` or as a key."""
    if isinstance(node, ast.Attribute) and node.attr == "trust_remote_code":
        return "trust_remote_code"
    if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
        return "trust_remote_code"
    return None


def test_no_code_comes_out_of_data() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    found = [f"{f.relative_to(ROOT)}:{what}" for f in files for what in dangers(f.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
        "AutoConfig.from_pretrained(m, trust_remote_code=True)",
        "config.trust_remote_code = True",
        "subprocess.run(line, shell=True)",
    ],
)
def test_a_planted_danger_is_found(line: str) -> None:
    assert dangers(f"def f():\n    {line}\n")


def test_a_request_imports_nothing() -> None:
    with pytest.raises(SettingsError, match="diffusion_algorithm must be a registered name"):
        SERVED.options({"diffusion_algorithm": "os:abort"})


# ---- bounds


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"diffusion_max_steps": MAX_STEPS + 1}, "diffusion_max_steps"),
        ({"diffusion_canvas_length": MAX_CANVAS + 1}, "diffusion_canvas_length"),
        ({"diffusion_seed_canvas": [0] * (MAX_CANVAS + 1)}, "diffusion_seed_canvas"),
        (
            {"diffusion_seed_canvas": [0], "diffusion_pinned": [0] * (MAX_CANVAS + 1)},
            "diffusion_pinned",
        ),
        ({"diffusion_seed_canvas": [0], "diffusion_pinned": [0, 0]}, "diffusion_pinned"),
    ],
)
def test_a_request_is_bounded(options: dict[str, object], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        SERVED.options(options)


def test_the_document_states_the_bounds() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for name, value in (
        ("diffusion_max_steps", MAX_STEPS),
        ("diffusion_canvas_length", MAX_CANVAS),
        ("diffusion_seed_canvas", MAX_CANVAS),
    ):
        row = next(line for line in text.splitlines() if line.startswith("|") and name in line)
        assert f"{value:,}" in row, row
