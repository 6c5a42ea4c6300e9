"""Request over server over checkpoint over default, and where each value came from."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.parsing import parse_options
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings


def served(checkpoint: dict[str, float] | None = None, **settings: Any) -> Served:
    return Served("mask", "LowConfidence", DllmSettings(**settings), checkpoint or {}, length=32)


def test_precedence() -> None:
    both = {"threshold": 0.6, "edit_threshold": 0.2}
    server = served(both, algorithm="JointThreshold", parameters={"threshold": 0.7})
    plain = server.choose()
    assert plain.algorithm.name == "JointThreshold"
    assert plain.settings.values()["threshold"] == 0.7
    assert plain.settings.values()["edit_threshold"] == 0.2
    assert plain.sources == {
        "threshold": "server",
        "edit_threshold": "checkpoint",
        "max_post_edit_steps": "default",
        "penalty_lambda": "default",
        "algorithm": "server",
        "max_steps": "default",
    }
    asked = server.choose({"threshold": 0.8, "max_steps": 5})
    assert asked.settings.values()["threshold"] == 0.8
    assert asked.max_steps == 5
    assert (asked.sources["threshold"], asked.sources["max_steps"]) == ("request", "request")


OWN = "ConfidenceThreshold-DiffCoder"  # a family's preset, which is a default
Q = served(algorithm="JointThreshold-Q", parameters={"threshold": 0.9})
UNIFORM = Served("uniform", "EntropyBound", DllmSettings(), {"max_denoising_steps": 9})


def family(checkpoint: dict[str, float], **settings: Any) -> Served:
    return Served("mask", OWN, DllmSettings(**settings), checkpoint, length=4)


@pytest.mark.parametrize(
    ("server", "options", "wanted"),
    [
        (Q, {}, {"threshold": 0.9, "edit_threshold": 0.5}),
        (Q, {"algorithm": "JointThreshold-S"}, {"threshold": 0.5, "edit_threshold": 0.0}),
        (family({}), {}, {"threshold": 0.95}),
        (family({}), {"threshold": 0.5}, {"threshold": 0.5}),
        (family({}), {"algorithm": "ConfidenceThreshold"}, {"threshold": 0.9}),
        (family({"threshold": 0.7}), {}, {"threshold": 0.7}),
        (family({"threshold": 0.7}, parameters={"threshold": 0.6}), {}, {"threshold": 0.6}),
    ],
)
def test_presets(server: Served, options: dict[str, Any], wanted: dict[str, float]) -> None:
    assert wanted.items() <= server.choose(options).settings.values().items()


@pytest.mark.parametrize(
    ("server", "asked", "most"),
    [
        (served(), None, 33),
        (served(algorithm="JointThreshold"), None, 32 + 16 + 1),
        (served({"max_denoising_steps": 7}), None, 7),
        (UNIFORM, 4, 4),
        (UNIFORM, 40, 9),
    ],
)
def test_caps(server: Served, asked: int | None, most: int) -> None:
    choice = server.choose({"max_steps": asked} if asked else {})
    assert choice.max_steps == most
    assert server is not UNIFORM or choice.schedule_steps == 9


EDITS = "max_post_edit_steps"


@pytest.mark.parametrize(
    ("server", "most"),
    [
        (served(), 4 * 32),
        (Served("mask", "LowConfidence", DllmSettings(), length=8), 4 * 8),
        # What a request gets unasked, it may ask for.
        (Served("mask", "LowConfidence", DllmSettings(), length=2), 16),
        (served(algorithm="JointThreshold", parameters={EDITS: 500}), 500),
        (served({EDITS: 300}), 300),
        (served(request_step_limit=1000), 1000),
        (served(request_step_limit=20), 20),
        (served(request_step_limit=2), 16),
    ],
)
def test_steps_that_positions_do_not_bound(server: Served, most: int) -> None:
    """Without a limit a request could occupy a slot for 65,536 editing steps a canvas."""

    def asking(steps: int) -> dict[str, Any]:
        return {"algorithm": "JointThreshold", EDITS: steps}

    assert server.choose(asking(most)).settings.values()[EDITS] == most
    named = rf"diffusion_{EDITS} must be at most {most} .*dllm\.request_step_limit"
    for beyond in (most + 1, 65536):
        with pytest.raises(SettingsError, match=named):
            server.choose(asking(beyond))


def test_a_value_is_refused_with_its_source() -> None:
    with pytest.raises(SettingsError, match=r"generation_config\.json: threshold must be"):
        served({"threshold": -1}).choose()
    uniform = Served("uniform", "EntropyBound", DllmSettings(parameters={"t_min": 0.9}))
    with pytest.raises(SettingsError, match=r"t_max must be above dllm\.t_min=0\.9"):
        uniform.choose()
    with pytest.raises(SettingsError, match=r"^diffusion_t_max must be above dllm\.t_min=0\.9"):
        uniform.choose({"t_max": 0.85})


def test_only_what_the_server_accepts_is_advised() -> None:
    """Such as ``diffusion_steps`` on a server of Nemotron-Labs-Diffusion."""
    nemotron = replace(served(), own_algorithm="ConfidenceThreshold", verifies=True)
    for server in (served(), nemotron):
        with pytest.raises(SettingsError, match="remove it, or set diffusion_algorithm") as caught:
            parse_options({"diffusion_steps": 4}, server)
        advised = re.findall(r"[A-Z]\w+", str(caught.value).partition(", or set ")[2])
        assert "LowConfidenceStatic" in advised
        for name in advised:
            server.choose(
                parse_options({"diffusion_algorithm": name, "diffusion_steps": 4}, server)
            )
    with pytest.raises(SettingsError, match="unknown decoding algorithm 'Zzz'; choose") as caught:
        served().choose({"algorithm": "Zzz"})
    for name in re.findall(r"[A-Z][\w-]+", str(caught.value).partition("choose ")[2]):
        served().choose({"algorithm": name})
