"""Algorithms by name: ours, presets, paths, and what is refused."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from vllm_dllm.decoding import Algorithm, get_algorithm, register_algorithm, registry
from vllm_dllm.decoding.entropy_bound import EntropyBound, MaskedEntropyBound
from vllm_dllm.decoding.joint_threshold import JointThreshold
from vllm_dllm.decoding.registry import algorithm_names
from vllm_dllm.decoding.thresholds import LowConfidence
from vllm_dllm.ranges import SettingsError


def test_one_name_for_both_kinds_of_model() -> None:
    assert isinstance(get_algorithm("EntropyBound", "mask")[0], MaskedEntropyBound)
    assert isinstance(get_algorithm("EntropyBound", "uniform")[0], EntropyBound)


def test_presets() -> None:
    algorithm, values = get_algorithm("JointThreshold-Q", "mask")
    assert isinstance(algorithm, JointThreshold)
    assert values == {"threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16}
    assert {"JointThreshold-S", "JointThreshold-Q"} <= set(algorithm_names("mask"))
    for name in algorithm_names("mask"):
        algorithm, values = get_algorithm(name, "mask")
        algorithm.config(**values)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LowConfidense", "did you mean 'LowConfidence'"),
        ("JointThreshold-X", "did you mean 'JointThreshold"),
        ("Zzz", "choose ConfidenceThreshold, Credit, EntropyBound"),
        ("nowhere:Rule", "'nowhere:Rule' cannot be loaded"),
        ("json:JSONDecoder", "cannot be loaded"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        get_algorithm(name, "mask")


def test_a_name_is_taken_once() -> None:
    class Impostor(LowConfidence):
        pass

    with pytest.raises(ValueError, match="'LowConfidence' is registered twice"):
        register_algorithm(Impostor)
    register_algorithm(LowConfidence)  # the same class again, as when a module is reloaded


@pytest.fixture
def somebodys_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module to import algorithms from; what is registered is forgotten after the test."""
    module = types.ModuleType("somebodys_rules")
    monkeypatch.setitem(sys.modules, "somebodys_rules", module)
    with patch.dict(registry._REGISTRY):
        yield module


def test_a_path(somebodys_rules: types.ModuleType) -> None:
    class Rule(LowConfidence):
        name = "FromAPath"

    somebodys_rules.Rule = Rule
    assert isinstance(get_algorithm("somebodys_rules:Rule", "mask")[0], Rule)
    with pytest.raises(SettingsError, match="does not fit"):
        get_algorithm("somebodys_rules:Rule", "uniform")


def test_a_rule_without_a_step(somebodys_rules: types.ModuleType) -> None:
    """It was registered, and ended the engine when the first request asked for it."""

    class Rule(Algorithm):
        name = "Unfinished"

    somebodys_rules.Rule = Rule
    with pytest.raises(SettingsError, match="cannot be loaded: Rule does not define step"):
        get_algorithm("somebodys_rules:Rule", "mask")
    assert "Unfinished" not in algorithm_names("mask")


@pytest.mark.parametrize("name", ["A" * 20_000_000, "JointThreshold-" + "Q" * 20_000_000])
def test_a_name_without_end(name: str) -> None:
    begin = time.process_time()
    with pytest.raises(SettingsError, match="unknown decoding algorithm") as caught:
        get_algorithm(name, "mask")
    assert time.process_time() - begin < 0.5
    assert len(str(caught.value)) < 1000
