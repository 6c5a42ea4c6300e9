"""Settings that depend on each other, and what is said of names; test_bad_input.py has values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.parsing import parse_options, parse_settings
from vllm_dllm.settings.resolution import ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"treshold": 0.5}, "unknown dllm setting 'treshold'; did you mean 'threshold'"),
        ({"zzz": 0}, "known: algorithm, blocks, blocks_open_at, constraint_depth"),
        # What belongs to an algorithm for other models, to requests, or goes without the prefix.
        ({"low": 1}, "^dllm.low is not a setting of LowConfidence"),
        ({"lowe": 1}, "unknown dllm setting 'lowe': dllm.low is not"),
        ({"stream_prefix": 1}, "send diffusion_stream_prefix in vllm_xargs"),
        ({"diffusion_threshold": 1}, "did you mean 'threshold'"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings({"dllm": given})


UNKNOWN = "vllm_xargs: '{}' is unknown.*"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diffusion_treshold", "did you mean 'diffusion_threshold'"),
        (
            "diffusion_low",
            "^diffusion_low is not a setting of LowConfidence, which has diffusion_threshold; "
            "remove it, or set diffusion_algorithm to Hierarchical$",
        ),
        ("diffusion_t_min", "^diffusion_t_min is not a setting of LowConfidence.*remove it$"),
        ("diffusion_lows", "unknown request option 'diffusion_lows': diffusion_low is not"),
        ("diffusion_execution", r"dllm\.execution of --additional-config"),
        *(
            (name, f"{name!r} is ignored; the option is 'diffusion_{name}'")
            for name in ("threshold", "max_steps", "algorithm", "low")
        ),
        # Of other engines.
        ("num_denoising_steps", UNKNOWN + "called 'diffusion_max_steps'"),
        ("dllm_unmasking_strategy", UNKNOWN + "called 'diffusion_algorithm'"),
        ("remasking", UNKNOWN + "called 'diffusion_algorithm'"),
        ("dllm_threshold", UNKNOWN + "called 'diffusion_threshold'"),
        ("block_length", UNKNOWN + "--diffusion-config .*canvas_length"),
        ("dllm_block_length", UNKNOWN + "--diffusion-config"),
        ("thresholds", UNKNOWN + "did you mean 'diffusion_threshold'"),
    ],
)
def test_options_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("{}", name)):
        request({name: 1})


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
