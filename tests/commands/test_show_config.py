"""``vllm-dllm show-config``: each value with its source, refusals, answers that are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny.make_twin import make_twin
from tests.commands.running import command, seconds_of_children
from tests.support.checkpoints import TINY

SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
ROOT = Path(__file__).resolve().parents[2]


def show_config(
    model: str | Path, settings: dict[str, Any], *more: str, **env: str
) -> subprocess.CompletedProcess[str]:
    section = json.dumps({"dllm": settings})
    return subprocess.run(
        command("show-config", str(TINY / model), "--additional-config", section, *more),
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.engine
@pytest.mark.slow
def test_show_config() -> None:
    done = show_config("tiny-llada2", {"algorithm": "JointThreshold-Q", "threshold": 0.6})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["algorithm", "JointThreshold", "server"] in lines
    assert ["threshold", "0.6", "server"] in lines
    assert ["edit_threshold", "0.5", "server"] in lines
    assert ["penalty_lambda", "0", "default"] in lines
    assert ["execution", "fdfo", "default"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines
    done = show_config("tiny-diffusiongemma", {"execution": "sync"})
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["entropy_bound", "0.1", "checkpoint"] in lines
    assert ["max_steps", "32", "checkpoint"] in lines
    assert ["execution", "sync", "server"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines


@pytest.mark.engine
def test_a_diffusion_config_may_leave_the_canvas_length_to_the_checkpoint() -> None:
    own = ("--diffusion-config", '{"max_denoising_steps": 5}')
    lines = [
        line.split() for line in show_config("tiny-diffusiongemma", {}, *own).stdout.splitlines()
    ]
    assert ["max_steps", "5", "server"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines


@pytest.mark.engine
def test_show_config_of_a_checkpoint_that_leaves_things_open(tmp_path: Path) -> None:
    """The canvas length is the model's default, until ``--diffusion-config`` names one."""
    model = make_twin(tmp_path / "twin")
    lines = [line.split() for line in show_config(model, {}).stdout.splitlines()]
    assert ["canvas_length", "32", "default"] in lines
    own = ("--diffusion-config", '{"canvas_length": 16, "max_denoising_steps": 9}')
    done = show_config(model, {"execution": "fdfo"}, *own)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["canvas_length", "16", "server"] in lines
    assert ["max_steps", "9", "server"] in lines
    assert ["execution", "fdfo", "server"] in lines


@pytest.mark.engine
def test_an_algorithm_by_its_path_has_settings() -> None:
    """They are unknown until the path is imported, which must come first."""
    package = ROOT / "tests" / "packages" / "half_at_a_time"
    settings = {"algorithm": "half_at_a_time:HalfAtATime", "share": 0.25}
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    done = show_config("tiny-llada2", settings, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["algorithm", "HalfAtATime", "server"] in lines
    assert ["share", "0.25", "server"] in lines


@pytest.mark.engine
def test_show_config_refuses() -> None:
    """In one line, without what pydantic writes around it."""
    done = show_config("tiny-llada2", {"treshold": 0.6})
    assert done.returncode == 1
    assert done.stderr.startswith("refused: unknown dllm setting 'treshold'; did you mean")
    assert len(done.stderr.splitlines()) == 1
    done = show_config("no-such-model", {})
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    done = show_config("tiny-llada2", {}, "--additional-config", "[1]")
    assert done.returncode == 2
    assert "a JSON object is needed, got [1]" in done.stderr


@pytest.mark.engine
def test_show_config_reads_a_checkpoint_that_changed(tmp_path: Path) -> None:
    """Its answer is kept, until a file of the checkpoint changes."""
    model = make_twin(tmp_path / "twin")
    assert ["canvas_length", "32", "default"] in lines_of(show_config(model, {}))
    begin = seconds_of_children()
    assert ["canvas_length", "32", "default"] in lines_of(show_config(model, {}))
    assert seconds_of_children() - begin < 2
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"block_length": 16}))
    assert ["canvas_length", "16", "checkpoint"] in lines_of(show_config(model, {}))


def lines_of(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]
