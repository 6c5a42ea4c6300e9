"""The room is imported early, in every process of vLLM, so importing it must not import much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).resolve().parents[2] / "vllm_dllm" / "vllm_seams"
# These import vLLM. They are imported only where requests for our models enter, a server of ours is
# running, an engine of ours has workers, or a request is traced.
LATE = {"decisions", "http_endpoints", "outputs"}


def imported_with(*modules: str) -> set[str]:
    """All that a new process has imported once it has imported these modules of the room."""
    code = "import importlib, json, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(json.dumps(list(sys.modules)))"]
        + [f"vllm_dllm.vllm_seams.{name}" for name in modules],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_room_imports_nothing_of_vllm() -> None:
    names = {path.stem for path in ROOM.glob("*.py")} | {"channels"}
    assert not imported_with(*names - LATE - {"__init__"}) & {"vllm", "transformers"}


def test_the_version_check_imports_nothing() -> None:
    """It comes first, also for a vLLM that this package must leave alone."""
    assert not imported_with("versions") & {"vllm", "transformers", "torch"}


def test_the_worker_s_module_brings_nothing_else_of_ours() -> None:
    at_start = imported_with()  # a development environment has a hook that is run at the start
    ours = {name for name in imported_with("runner") - at_start if name.startswith("vllm_dllm.")}
    room = "vllm_dllm.vllm_seams"
    assert ours == {room, f"{room}.runner", f"{room}.wrapping"}
