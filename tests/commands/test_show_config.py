"""``vllm-dllm show-config``: each value with its source, all flags of ``vllm serve``, refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm.plugins import load_general_plugins

from examples.tiny.make_twin import make_twin
from tests.support.checkpoints import TINY
from tests.support.commands import command
from vllm_dllm.commands import show_config
from vllm_dllm.vllm_seams.registration import RefusedError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine
# Of this package when an engine is configured, and of vLLM when a model's fields are set.
REFUSALS = (RefusedError, ValueError)


def shown(model: str | Path, *flags: str, **settings: Any) -> dict[str, tuple[str, str]]:
    """The value and the source of each setting, by name; `settings` are the server's."""
    load_general_plugins()
    section = json.dumps({"dllm": settings})
    arguments = [str(TINY / model), "--enforce-eager", "--additional-config", section, *flags]
    return {name: (value, source) for name, value, source in show_config.explain(arguments)}


OVERRIDE, FOLDER = "--override-generation-config", "--generation-config"
LLADA2, SDAR, GEMMA = "tiny-llada2", "tiny-sdar", "tiny-diffusiongemma"


def overridden(**fields: Any) -> tuple[str, str]:
    return OVERRIDE, json.dumps(fields)


@pytest.mark.parametrize(
    ("model", "flags", "settings", "wanted"),
    [
        (
            *(LLADA2, (), {"algorithm": "JointThreshold-Q", "threshold": 0.6}),
            {
                "algorithm": ("JointThreshold", "server"),
                "threshold": ("0.6", "server"),
                "edit_threshold": ("0.5", "server"),
                "penalty_lambda": ("0", "default"),
                "execution": ("fdfo", "default"),
                "canvas_length": ("32", "checkpoint"),
            },
        ),
        # What the server chose is the server's, although it is the default; null leaves the choice.
        (
            *(LLADA2, (), {"threshold": 0.95, "max_steps": None, "kernels": "auto"}),
            {
                "threshold": ("0.95", "server"),
                "max_steps": ("33", "default"),
                "kernels": ("auto", "server"),
            },
        ),
        (
            *(GEMMA, ("--diffusion-config", '{"max_denoising_steps": 5}'), {"execution": "sync"}),
            {
                "entropy_bound": ("0.1", "checkpoint"),
                "max_steps": ("5", "server"),
                "execution": ("sync", "server"),
                "canvas_length": ("32", "checkpoint"),
            },
        ),
        # Fields that are overridden act as in the file, below the server's settings.
        *(
            (
                *(model, overridden(threshold=0.7, max_denoising_steps=9, temperature=0.5), {}),
                {"threshold": ("0.7", OVERRIDE), "max_steps": ("9", OVERRIDE)},
            )
            for model in (LLADA2, SDAR)
        ),
        (
            *(LLADA2, (*overridden(threshold=0.7), FOLDER, "vllm"), {"threshold": 0.6}),
            {"threshold": ("0.6", "server")},
        ),
        # An object is merged into the file's.
        (
            *(GEMMA, overridden(sampler_config={"entropy_bound": 0.2}, t_max=0.7), {}),
            {
                "entropy_bound": ("0.2", OVERRIDE),
                "t_max": ("0.7", OVERRIDE),
                "t_min": ("0.4", "checkpoint"),
                "max_steps": ("32", "checkpoint"),
            },
        ),
    ],
)
def test_each_value_has_its_source(
    model: str, flags: tuple[str, ...], settings: dict[str, Any], wanted: dict[str, Any]
) -> None:
    lines = shown(model, *flags, **settings)
    assert {name: lines[name] for name in wanted} == wanted


def test_a_checkpoint_that_leaves_things_open(tmp_path: Path) -> None:
    """The canvas length is the model's default, until ``--diffusion-config`` names one."""
    model = make_twin(tmp_path / "twin")
    assert shown(model)["canvas_length"] == ("32", "default")
    own = ("--diffusion-config", '{"canvas_length": 16, "max_denoising_steps": 9}')
    lines = shown(model, *own, execution="fdfo")
    assert lines["canvas_length"] == ("16", "server")
    assert lines["max_steps"] == ("9", "server")
    assert lines["execution"] == ("fdfo", "server")


def test_a_whole_command_line_can_be_pasted(tmp_path: Path) -> None:
    """Flags of the server, nested keys, underscores, and ``--config``, whose flags count less."""
    file = tmp_path / "server.yaml"
    file.write_text(
        "port: 9000\nmax-model-len: 512\ndiffusion-config:\n  max_denoising_steps: 7\n"
        "additional-config:\n  dllm:\n    execution: sync\n"
    )
    lines = show_config.explain(
        [
            *(str(TINY / SDAR), "--config", str(file), "--host", "127.0.0.1"),
            *("--diffusion_config.canvas_length", "8", "--served-model-name", "m", "other"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "-tp", "1"),
            *("--async-scheduling", "--api-key", "secret", "--port", "9001"),
        ]
    )
    lines = {name: (value, source) for name, value, source in lines}
    assert lines["canvas_length"] == ("8", "server")
    assert lines["execution"] == ("sync", "server")


def test_the_command() -> None:
    """An algorithm that is named by its path; its settings are unknown until it is imported."""
    package = ROOT / "tests" / "packages" / "half_at_a_time"
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    settings = '{"dllm": {"algorithm": "half_at_a_time:HalfAtATime", "share": 0.25}}'
    asked = command("show-config", str(TINY / LLADA2), "--additional-config", settings)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(asked, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["algorithm", "HalfAtATime", "server"] in lines
    assert ["share", "0.25", "server"] in lines


def test_the_command_refuses(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(show_config.installation, "load", lambda level: load_general_plugins())
    llada2 = str(TINY / LLADA2)
    assert show_config.run([llada2, "--additional-config", '{"dllm": {"treshold": 0.6}}']) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("refused: unknown dllm setting 'treshold'; did you mean")
    assert show_config.run([str(TINY / "no-such-model")]) == 1
    assert "no-such-model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        show_config.run([llada2, "--additional-konfig", "{}"])
    assert "unrecognized arguments: --additional-konfig" in capsys.readouterr().err


def test_a_generation_config_of_another_folder(tmp_path: Path) -> None:
    """It takes the place of the checkpoint's; ``--generation-config vllm`` leaves it."""
    file = tmp_path / "generation_config.json"
    stated = json.loads((TINY / GEMMA / file.name).read_text())
    file.write_text(json.dumps(stated | {"t_max": 0.6}))
    lines = shown(GEMMA, FOLDER, str(tmp_path), *overridden(t_min=0.1))
    assert lines["t_max"] == ("0.6", FOLDER)
    assert lines["t_min"] == ("0.1", OVERRIDE)
    assert shown(GEMMA, FOLDER, "vllm")["t_max"] == ("0.8", "checkpoint")
    file.write_text("[]")
    with pytest.raises(REFUSALS, match=r"generation_config\.json is not a JSON object"):
        shown(GEMMA, FOLDER, str(tmp_path))


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        (SDAR, {"block_length": 8}, "--diffusion-config '{\"canvas_length\": 8}'"),
        (LLADA2, {"max_steps": 4}, '--additional-config \'{"dllm": {"max_steps": 4}}\''),
        (GEMMA, {"threshold": 0.5}, "threshold is not a setting of this model"),
        (GEMMA, {"entropy_bound": 1}, '\'{"dllm": {"entropy_bound": 1}}\''),
        (GEMMA, {"sampler_config": {"bound": 1}}, "unknown sampler_config.bound"),
        (GEMMA, {"sampler_config": 3}, "sampler_config must be an object"),
        (SDAR, {"threshold": "high"}, "threshold must be a number"),
    ],
)
def test_an_override_that_cannot_act_is_refused(
    model: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(REFUSALS, match=rf"{OVERRIDE}: .*") as refused:
        shown(model, *overridden(**fields))
    assert said in str(refused.value)


def test_overrides_are_not_blamed_on_the_checkpoint(
    package_log: pytest.LogCaptureFixture,
) -> None:
    recipe = {"diffusion_sampler": "entropy_bound", "diffusion_entropy_bound": 0.1}
    shown(GEMMA, "--hf-overrides", json.dumps(recipe))
    shown(LLADA2, "--hf-overrides", '{"jitter": 1}')
    said = [record.getMessage() for record in package_log.records]
    for names in ("diffusion_sampler and diffusion_entropy_bound", "jitter"):
        (one,) = (message for message in said if f"fields without effect: {names};" in message)
        assert one.startswith("dllm: --hf-overrides")
    assert not any(message.startswith("dllm: config.json") for message in said)
    for model in (LLADA2, SDAR, GEMMA):
        lines = shown(model, "--hf-overrides.canvas_length", "16")
        assert lines["canvas_length"] == ("16", "--hf-overrides")
    for model, field in ((LLADA2, "norm_softmax"), (SDAR, "attention_bias")):
        with pytest.raises(REFUSALS, match=f"--hf-overrides: {field}=True asks for"):
            shown(model, "--hf-overrides", json.dumps({field: True}))
