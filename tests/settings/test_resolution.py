"""Request over server over checkpoint over default, and where each value came from."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from vllm_dllm.commands.show_config import explained
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.parsing import parse_options, parse_settings
from vllm_dllm.settings.resolution import CHECKPOINT, Served
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


def test_what_show_config_prints() -> None:
    """A value that the server chose is the server's, even where it is the default."""

    def shown(**section: Any) -> dict[str, list[str]]:
        settings = parse_settings({"dllm": section}, "mask", "LowConfidence")
        stated = {"threshold": 0.6}
        served = Served("mask", "LowConfidence", settings, stated, 32, settings.max_steps)
        return {name: rest for name, *rest in explained(served, CHECKPOINT, section)}

    assert shown() == {
        "algorithm": ["LowConfidence", "default"],
        "threshold": ["0.6", "checkpoint"],
        "max_steps": ["33", "default"],
        "canvas_length": ["32", "checkpoint"],
        "execution": ["fdfo", "default"],
        "eos_early_stop": ["default", "default"],
        "skip_last_commit": ["True", "default"],
        "fused_commit": ["auto", "default"],
        "window": ["symmetric", "default"],
        "kernels": ["auto", "default"],
        "request_step_limit": ["default", "default"],
        "constraint_depth": ["default", "default"],
        "constraint_tokens": ["2048", "default"],
        "threshold_under_load": ["default", "default"],
        "blocks": ["1", "default"],
        "blocks_open_at": ["default", "default"],
    }
    chosen = {
        "algorithm": "LowConfidence",
        "threshold": 0.95,
        "max_steps": 33,
        "execution": "fdfo",
        "eos_early_stop": True,
        "skip_last_commit": True,
        "fused_commit": "off",
        "window": "symmetric",
        "kernels": "auto",
        "request_step_limit": 64,
    }
    assert {name: shown(**chosen)[name] for name in chosen} == {
        name: [str(value), "server"] for name, value in chosen.items()
    }
    unset = shown(algorithm=None, max_steps=None, eos_early_stop=None)
    assert unset == shown(), "null leaves the choice to others"


def test_presets_count_where_they_were_chosen() -> None:
    server = served(algorithm="JointThreshold-Q", parameters={"threshold": 0.9})
    values = server.choose().settings.values()
    assert (values["threshold"], values["edit_threshold"]) == (0.9, 0.5)
    values = server.choose({"algorithm": "JointThreshold-S"}).settings.values()
    assert (values["threshold"], values["edit_threshold"]) == (0.5, 0.0)


def test_the_preset_of_a_family_is_a_default() -> None:
    own = "ConfidenceThreshold-DiffCoder"
    server = Served("mask", own, DllmSettings(), {}, length=4)
    plain = server.choose()
    assert plain.settings.values() == {"threshold": 0.95}
    assert (plain.sources["algorithm"], plain.sources["threshold"]) == ("default", "default")
    assert server.choose({"threshold": 0.5}).settings.values() == {"threshold": 0.5}
    named = server.choose({"algorithm": "ConfidenceThreshold"})
    assert named.settings.values() == {"threshold": 0.9}
    stated = Served("mask", own, DllmSettings(), {"threshold": 0.7}, length=4).choose()
    assert (stated.settings.values()["threshold"], stated.sources["threshold"]) == (
        *(0.7, "checkpoint"),
    )
    given = Served("mask", own, DllmSettings(parameters={"threshold": 0.6}), {"threshold": 0.7})
    assert given.choose().settings.values() == {"threshold": 0.6}


def test_caps() -> None:
    assert served().choose().max_steps == 33
    assert served(algorithm="JointThreshold").choose().max_steps == 32 + 16 + 1
    assert served({"max_denoising_steps": 7}).choose().max_steps == 7
    uniform = Served("uniform", "EntropyBound", DllmSettings(), {"max_denoising_steps": 9})
    assert uniform.choose({"max_steps": 4}).max_steps == 4
    late = uniform.choose({"max_steps": 40})
    assert (late.max_steps, late.schedule_steps) == (9, 9)


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


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (served(parameters={"threshold": -1}), {}, "dllm.threshold must be"),
        (served({"threshold": -1}), {}, "generation_config.json: threshold must be"),
        (served(), {"threshold": True}, "diffusion_threshold must be a number"),
        (served(), {"algorithm": "LowConfidens"}, "did you mean 'LowConfidence'"),
        (served(algorithm="EntropyBond"), {}, "did you mean 'EntropyBound'"),
    ],
)
def test_refused(server: Served, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        server.choose(options)


def test_the_falling_schedule() -> None:
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


def test_a_setting_of_another_algorithm() -> None:
    named = (
        r"^diffusion_low is not a setting of LowConfidence, which has diffusion_threshold; "
        r"remove it, or set diffusion_algorithm to Hierarchical$"
    )
    with pytest.raises(SettingsError, match=named):
        parse_options({"diffusion_low": 0.1}, served())
    options = parse_options({"diffusion_algorithm": "Hierarchical", "diffusion_low": 0.1}, served())
    assert served().choose(options).settings.values()["low"] == 0.1
    with pytest.raises(SettingsError, match=r"remove it, because it belongs to EntropyBound, for"):
        parse_options({"diffusion_t_min": 0.1}, served())
