"""What the package never does, and the bounds that `SECURITY.md` promises."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest

from vllm_dllm.ranges import MAX_STEPS
from vllm_dllm.settings.file import MAX_FILE_BYTES
from vllm_dllm.settings.parsing import SettingsError, parse_request_options, parse_settings
from vllm_dllm.settings.request import MAX_CANVAS
from vllm_dllm.settings.unknown_names import parameter_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_dllm"

# Code or objects out of data. `compile` is `torch.compile` or nothing.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# yaml.load and torch.load are judged by their arguments, below.
UNSAFE = {
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all"),
    *("os.system", "os.popen", "numpy.load"),
}
# Loaders that are made from the safe one, or are it.
SAFE_LOADERS = {"_loader()", "yaml.SafeLoader"}


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
    if name == "yaml.load" and given.get("Loader") not in SAFE_LOADERS:
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
        parse_request_options({"diffusion_algorithm": "os:abort"}, parameter_names("mask"))


# ---- the settings file


def read(content: str, file: Path) -> None:
    file.write_text(content)
    parse_settings({"dllm": {"config": str(file)}}, lambda algorithm: parameter_names("mask"))


NESTED = 20_000
BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join(['*' + chr(97 + n)] * 9)}]}}\n"
    for n in range(12)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "aliases"),
        ("a: &a [1]\nthreshold: *a\n", "aliases"),
        ("threshold: 0.5\nthreshold: 0.9\n", "'threshold' is set twice"),
        ("{max_steps: 3, threshold: 1, max_steps: 4}", "'max_steps' is set twice"),
        ("max_steps: 010\n", "'010' is not a plain decimal number"),
        ("max_steps: 1:30\n", "'1:30' is not a plain decimal number"),
        ("max_steps: 0x1f\n", "'0x1f' is not a plain decimal number"),
        ("max_steps: 1_000\n", "'1_000' is not a plain decimal number"),
        ("threshold: 0_1.5\n", "'0_1.5' is not a plain decimal number"),
        ("[" * NESTED, "cannot read"),
        ("threshold: " + "[" * NESTED + "]" * NESTED, "cannot read"),
        ("max_steps: " + "9" * 5000, "cannot read"),
        ("!!python/object/apply:os.abort []", "cannot read"),
        ("threshold: !!python/name:os.abort", "cannot read"),
        ("--- {}\n--- {}\n", "cannot read"),
        ("\0", "cannot read"),
        (" " * MAX_FILE_BYTES + "\n", f"larger than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_settings_file_that_is_more_than_data(content: str, message: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(SettingsError, match=r"dllm\.config") as caught:
        read(content, tmp_path / "settings.yaml")
    assert message in str(caught.value)
    assert time.monotonic() - started < 20


def test_the_largest_file_is_read_in_time(tmp_path: Path) -> None:
    names = "".join(f"name{n}: {n}\n" for n in range(10_000))[: MAX_FILE_BYTES - 20]
    started = time.monotonic()
    with pytest.raises(SettingsError, match="unknown dllm setting"):
        read(names.rpartition("\n")[0], tmp_path / "settings.yaml")
    assert time.monotonic() - started < 60  # about a second on a quiet machine


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-3 for text."""
    file = tmp_path / "settings.yaml"
    file.write_text("threshold: 1e-3\n")
    parsed = parse_settings({"dllm": {"config": str(file)}}, lambda a: parameter_names("mask"))
    assert parsed.parameters == {"threshold": 0.001}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(SettingsError, match=r"dllm\.config: .*not a regular file"):
            parse_settings({"dllm": {"config": str(path)}}, lambda algorithm: ())


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
        parse_request_options(options, parameter_names("uniform"))


def test_the_document_states_the_bounds() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for name, value in (
        ("diffusion_max_steps", MAX_STEPS),
        ("diffusion_canvas_length", MAX_CANVAS),
        ("diffusion_seed_canvas", MAX_CANVAS),
        ("file of `dllm.config`", MAX_FILE_BYTES),
    ):
        row = next(line for line in text.splitlines() if line.startswith("|") and name in line)
        assert f"{value:,}" in row, row
