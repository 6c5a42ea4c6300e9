"""Settings: every key, every refusal, and never another exception."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.parsing import parse_options, parse_settings
from vllm_dllm.settings.resolution import ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["threshold", "max_steps", "algorithm", "eos_early_stop", "x"])


def settings(additional_config: object) -> DllmSettings:
    return parse_settings(additional_config, "mask", "LowConfidence")


def request(extra_args: dict[Any, Any] | None) -> Any:
    return parse_options(extra_args or {}, Served("mask", "LowConfidence", DllmSettings()))


def test_defaults() -> None:
    assert settings({}) == settings({"dllm": {}}) == DllmSettings()
    assert settings({"other": 1}) == DllmSettings()
    assert request(None) == request({}) == {}


LOAD = {"from": 0.9, "to": 0.5, "at_requests": 5}


def test_a_threshold_under_load() -> None:
    rule = settings({"dllm": {"threshold_under_load": LOAD}}).threshold_under_load
    assert rule is not None
    assert [rule.at(n) for n in (0, 1, 2, 3, 5, 99)] == [0.9, 0.9, 0.8, 0.7, 0.5, 0.5]
    served = Served("mask", "LowConfidence", DllmSettings(threshold_under_load=rule))
    for options, threshold, follows in (
        ({}, 0.9, True),
        ({"threshold": 0.7}, 0.7, False),
        ({"algorithm": "Hierarchical"}, 0.9, True),
        ({"algorithm": "SubBlocks-Parallel"}, 0.95, False),
    ):
        choice = served.choose(options)
        assert (choice.settings.values()["threshold"], choice.follows_load) == (threshold, follows)
        assert ResolvedRequest.of(choice, options).follows_load is follows
    assert not served.choose({"algorithm": "FixedSteps"}).follows_load
    assert not Served("mask", "LowConfidence", DllmSettings()).choose().follows_load


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"threshold_under_load": 0.5}, "threshold_under_load must be an object, got 0.5"),
        ({"threshold_under_load": {**LOAD, "form": 1}}, "unknown key 'form' .*mean 'from'"),
        ({"threshold_under_load": {"from": 1, "to": 0}}, "at_requests must be a whole number"),
        ({"threshold_under_load": {**LOAD, "to": 1.5}}, "load.to must be at least 0 and at most 1"),
        ({"threshold_under_load": {**LOAD, "at_requests": 1}}, "at_requests must be at least 2"),
        ({"threshold_under_load": LOAD, "threshold": 0.9}, "exclude each other"),
        ({"threshold_under_load": LOAD, "algorithm": "FixedSteps"}, "FixedSteps has no setting"),
    ],
)
def test_a_threshold_under_load_that_is_refused(section: Any, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        settings({"dllm": section})


def test_blocks() -> None:
    """A request opens at most as many as the server, with an algorithm that can."""
    served = Served("mask", "LowConfidence", settings({"dllm": {"blocks": 4}}), length=8)
    assert (served.window_length, served.choose().blocks) == (32, 4)
    assert served.choose().max_steps == 9, "of a block"
    for blocks in (1, 3, 4):
        choice = served.choose(parse_options({"diffusion_blocks": blocks}, served))
        resolved = ResolvedRequest.of(choice)
        assert choice.blocks == resolved.blocks == resolved.decoding("mask").blocks == blocks
    for options, complaint in (
        ({"diffusion_blocks": 5}, r"diffusion_blocks must be at most 4 .*dllm.blocks.*, got 5"),
        ({"diffusion_blocks": 0}, "diffusion_blocks must be at least 1"),
        ({"diffusion_algorithm": "Credit"}, "algorithm: Credit cannot decode several blocks"),
        ({"diffusion_replay": True}, r"diffusion_replay: .* this server has dllm\.blocks=4"),
    ):
        with pytest.raises(SettingsError, match=complaint):
            served.choose(parse_options(options, served))
    with pytest.raises(SettingsError, match="blocks_open_at has no effect with one block"):
        settings({"dllm": {"blocks_open_at": 0.5}})
    with pytest.raises(SettingsError, match=r"dllm\.algorithm: SubBlocks cannot decode several"):
        Served("mask", "LowConfidence", DllmSettings("SubBlocks", blocks=2)).choose()
    with pytest.raises(SettingsError, match="diffusion_blocks must be at most 1 on this server"):
        Served("mask", "LowConfidence", DllmSettings()).choose({"blocks": 2})


def test_every_key() -> None:
    given = {
        "algorithm": "LowConfidence",
        "threshold": 0.5,
        "max_steps": 7,
        "execution": "sync",
        "eos_early_stop": False,
        "skip_last_commit": False,
        "fused_commit": False,
        "window": "reference",
        "kernels": "triton",
        "request_step_limit": 99,
        "constraint_depth": 16,
        "constraint_tokens": 7,
    }
    parsed = settings({"dllm": given})
    assert parsed == DllmSettings(
        "LowConfidence",
        {"threshold": 0.5},
        7,
        "sync",
        False,
        False,
        "off",
        "reference",
        "triton",
        99,
        16,
        7,
    )
    options = {
        "diffusion_threshold": 1,
        "diffusion_max_steps": 3,
        "diffusion_algorithm": "Credit",
        "session_id": "s",
    }
    assert request(options) == {"algorithm": "Credit", "threshold": 1, "max_steps": 3}
    read = {"diffusion_seed_canvas": [1, 2], "diffusion_pinned": [0], "diffusion_read_only": 1}
    assert request(read) == {"seed_canvas": [1, 2], "pinned": [0], "read_only": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"treshold": 0.5}, "unknown dllm setting 'treshold'; did you mean 'threshold'"),
        (
            {"zzz": 0},
            "known: algorithm, blocks, blocks_open_at, constraint_depth, constraint_tokens",
        ),
        ({"max_steps": 0}, "dllm.max_steps must be at least 1"),
        ({"max_steps": 2.0}, "dllm.max_steps must be a whole number"),
        ({"max_steps": 2**31}, "dllm.max_steps must be at least 1"),
        ({"eos_early_stop": "yes"}, "dllm.eos_early_stop must be true or false"),
        ({"skip_last_commit": None}, "dllm.skip_last_commit must be true or false"),
        ({"fused_commit": 1}, "dllm.fused_commit must be one of auto, on, off, got 1"),
        ({"algorithm": 3}, "dllm.algorithm must be a string"),
        ({"execution": "async"}, "dllm.execution must be one of fdfo, sync"),
        ({"constraint_depth": 15}, "dllm.constraint_depth must be at least 16 and at most 1024"),
        ({"constraint_depth": 1025}, "dllm.constraint_depth must be at least 16"),
        ({"constraint_tokens": 0}, "dllm.constraint_tokens must be at least 1"),
        ({"constraint_tokens": None}, "dllm.constraint_tokens must be a whole number"),
        ({"window": "round"}, "dllm.window must be one of symmetric, reference"),
    ],
)
def test_refused_with_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings({"dllm": given})


def test_a_request_names_no_path() -> None:
    """Else a client could import any module that the server has."""
    with pytest.raises(SettingsError, match="diffusion_algorithm must be a registered name"):
        request({"diffusion_algorithm": "os:system"})


@pytest.mark.parametrize(
    "key",
    [
        *("dlm", "llm", "dll", "dllms", "xdllm", "dxllm", "dlllm", "dxlm", "dllx"),
        *("dLLM", "DLLM", " dllm", "dllm ", "ldlm", "dlml", "Dlm"),
    ],
)
def test_a_key_one_edit_away_is_refused(key: str) -> None:
    for config in ({key: {}}, {"dllm": {}, key: {"algorithm": "x"}}):
        with pytest.raises(SettingsError, match=f"{key!r} is unknown; did you mean 'dllm'"):
            settings(config)


@pytest.mark.parametrize("key", ["", "d", "dl", "model", "dllmsettings", "mlld", "x" * 99])
def test_a_key_of_somebody_else_is_left_alone(key: str) -> None:
    assert settings({key: 1}) == settings({key: 1, "dllm": {}, 3: 4}) == DllmSettings()


@pytest.mark.parametrize("config", [None, ["dlm"], 3, object()])
def test_what_is_no_object_has_no_keys(config: object) -> None:
    assert settings(config) == DllmSettings()


@pytest.mark.parametrize("beside", [{}, {"dllm": {"max_steps": 4}}])
@pytest.mark.parametrize("name", ["threshold", "max_steps", "algorithm", "low", "t_min"])
def test_a_setting_outside_of_the_section_is_refused(name: str, beside: dict[str, Any]) -> None:
    """Of algorithms for other kinds of models, too; the message can be pasted."""
    with pytest.raises(SettingsError, match="is outside of") as caught:
        settings({name: 0.9} | beside)
    assert json.dumps({"dllm": {name: 0.9}}) in str(caught.value)


@pytest.mark.parametrize("name", ["threshold", "max_steps", "algorithm", "low"])
def test_an_option_without_its_prefix_is_refused(name: str) -> None:
    named = f"{name!r} is ignored; the option is 'diffusion_{name}'"
    with pytest.raises(SettingsError, match=named):
        request({name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_denoising_steps", "called 'diffusion_max_steps'"),
        ("dllm_unmasking_strategy", "called 'diffusion_algorithm'"),
        ("remasking", "called 'diffusion_algorithm'"),
        ("dllm_threshold", "called 'diffusion_threshold'"),
        ("block_length", r"--diffusion-config .*canvas_length"),
        ("dllm_block_length", "--diffusion-config"),
        ("thresholds", "did you mean 'diffusion_threshold'"),
    ],
)
def test_an_option_of_another_engine_is_refused(name: Any, hint: str) -> None:
    with pytest.raises(SettingsError, match=f"vllm_xargs: {name!r} is unknown") as caught:
        request({name: 1})
    assert re.search(hint, str(caught.value))


def test_what_others_may_read_is_left_to_them() -> None:
    own = {"kv_transfer_params": {"do_remote_prefill": False}, "session_id": "s", 3: 1}
    assert request(own | {"lmcache.tag.user": "x", "ngram_size": 3, "of_somebody_else": 1}) == {}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dllm_algorithm", "called 'algorithm'"),
        ("dllm_num_denoising_steps", "called 'max_steps'"),
        ("dllm_block_length", "--diffusion-config"),
        ("dllm_of_somebody_else", "known: "),
    ],
)
def test_a_setting_of_another_package_is_refused(name: str, hint: str) -> None:
    for beside in ({}, {"dllm": {"max_steps": 4}}):
        with pytest.raises(
            SettingsError, match=f"{name!r} is not a setting of vllm-dllm"
        ) as caught:
            settings({name: 1} | beside)
        assert hint in str(caught.value)


def test_names_that_belong_elsewhere() -> None:
    """To an algorithm for other models, to requests, to the server, or without the prefix."""

    cases = {
        "low": "^dllm.low is not a setting of LowConfidence",
        "lowe": "unknown dllm setting 'lowe': dllm.low is not",
        "stream_prefix": "send diffusion_stream_prefix in vllm_xargs",
        "diffusion_threshold": "write 'threshold'",
    }
    for name, message in cases.items():
        with pytest.raises(SettingsError, match=message):
            settings({"dllm": {name: 1}})
    cases = {
        "diffusion_low": "^diffusion_low is not a setting of LowConfidence",
        "diffusion_lows": "unknown request option 'diffusion_lows': diffusion_low is not",
        "diffusion_execution": r"dllm\.execution of --additional-config",
    }
    for name, message in cases.items():
        with pytest.raises(SettingsError, match=message):
            request({name: 1})


@pytest.mark.parametrize("section", [3, "x", [1]])
def test_section_must_be_an_object(section: object) -> None:
    with pytest.raises(SettingsError, match="must be an object"):
        settings({"dllm": section})


def test_options_of_a_constraint_have_ranges() -> None:
    given = request({"diffusion_constraint_depth": 1024, "diffusion_constraint_tokens": 1})
    assert given == {"constraint_depth": 1024, "constraint_tokens": 1}
    for value in (15, 1025, 20.0, True):
        with pytest.raises(SettingsError, match="diffusion_constraint_depth must be"):
            request({"diffusion_constraint_depth": value})
    with pytest.raises(SettingsError, match="diffusion_constraint_tokens must be at least 1"):
        request({"diffusion_constraint_tokens": 0})


def test_unknown_request_option_offers_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'diffusion_threshold'"):
        request({"diffusion_treshold": 0.5})


@given(st.dictionaries(KEYS, JSON))
def test_anything_parses_or_is_a_settings_error(section: dict[str, Any]) -> None:
    with contextlib.suppress(SettingsError):
        assert isinstance(settings({"dllm": section}), DllmSettings)


@given(st.dictionaries(st.sampled_from(["diffusion_threshold", "diffusion_max_steps", "a"]), JSON))
def test_any_request_option_parses_or_is_a_settings_error(options: dict[str, Any]) -> None:
    with contextlib.suppress(SettingsError):
        request(options)
