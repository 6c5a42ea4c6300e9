"""Bad files: generation_config.json and the settings file, field by field and as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.settings.test_bad_input import (
    STEP,
    TABLES,
    UNIFORM,
    company,
    refusal,
    served,
    setting_and_value,
)
from tests.support.strategies import ALWAYS, JSON, WILD, Number, same, share
from vllm_dllm.families.diffusion_gemma.engine_config import parse_sampler
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

# ---- generation_config.json

STATED = {
    "max_denoising_steps": 8,
    "t_min": 0.1,
    "t_max": 0.7000000000000001,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}
CHECKPOINT = {"max_denoising_steps": STEP} | {name: number for name, (_, number) in UNIFORM.items()}


def with_field(name: str, value: Any) -> dict[str, Any]:
    if name == "entropy_bound":
        return STATED | {"sampler_config": STATED["sampler_config"] | {name: value}}
    return STATED | {name: value}


@settings(max_examples=share(0.1))
@given(st.sampled_from(sorted(CHECKPOINT)), WILD | STEP.edges() | UNIFORM["t_max"][1].edges())
def test_the_sampler_of_a_checkpoint(name: str, value: Any) -> None:
    def choose() -> Any:
        stated = parse_sampler(with_field(name, value))
        return Served("uniform", "EntropyBound", DllmSettings(), stated).choose()

    said = refusal(choose)
    assert (said is None) == CHECKPOINT[name].takes(value), said
    if said is None:
        choice = choose()
        got = choice.max_steps if name == "max_denoising_steps" else choice.settings.values()[name]
        assert same(value, got)
    else:
        assert name in said


@settings(max_examples=share(0.03))
@given(st.sampled_from(sorted(STATED)), JSON, st.booleans())
def test_a_sampler_that_is_incomplete(name: str, value: Any, leave_out: bool) -> None:
    stated: Mapping[str, Any] = {k: v for k, v in STATED.items() if k != name}
    if not leave_out:
        stated = {**stated, "sampler_config": value}
    said = refusal(lambda: parse_sampler(stated))
    assert said is not None
    assert name in said or "sampler_config" in said


@settings(max_examples=share(0.05))
@given(st.sampled_from(["max_denoising_steps", "threshold"]), WILD | STEP.edges())
def test_what_a_masked_checkpoint_states(name: str, value: Any) -> None:
    def choose() -> Any:
        stated = {name: value, "top_p": 0.5}
        return Served("mask", "LowConfidence", DllmSettings(), stated).choose()

    said = refusal(choose)
    number = STEP if name == "max_denoising_steps" else Number()
    assert (said is None) == number.takes(value), said
    if said is None:
        choice = choose()
        got = choice.max_steps if name == "max_denoising_steps" else choice.settings.values()[name]
        assert same(value, got)
    else:
        assert name in said


def test_each_field_is_given_each_oddity() -> None:
    for value in ALWAYS:
        for name in CHECKPOINT:
            test_the_sampler_of_a_checkpoint.hypothesis.inner_test(name, value)
        for name in ("max_denoising_steps", "threshold"):
            test_what_a_masked_checkpoint_states.hypothesis.inner_test(name, value)


# ---- a YAML file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "settings.yaml"


@settings(max_examples=share(0.1))
@given(setting_and_value(JSON))
def test_a_setting_in_a_file(file: Path, case: tuple[str, str, Any]) -> None:
    """JSON is YAML, so the file is written as JSON; YAML's names of nan and inf are its own."""
    kind, name, value = case
    section = company(kind, name) | {name: value}
    text = json.dumps(section).replace("NaN", ".nan").replace("Infinity", ".inf")
    file.write_text(text)
    said = refusal(lambda: served(kind, {"config": str(file)}))
    assert (said is None) == TABLES[kind][name][1].takes(value), said
    if said is None:
        made = served(kind, {"config": str(file)})
        assert same(value, made.choose().settings.values()[name])
        # What stands beside the file wins.
        kept = served(kind, {"config": str(file), "max_steps": 3})
        assert kept.choose().max_steps == 3
    else:
        assert name in said or "dllm.config" in said


PIECES = "threshold|max_steps|: |:|\n|  |- |&a |*a|<<|!!int |0.5|[|]|{|}|'|\"|>|%YAML 1.1|010|1:30"
MORE = "!!python/object/apply:os.getpid []|0x1f|1_0|1e3|.inf|~|yes|---|...|? |#|\t|!!set |!!binary "
YAML = st.lists(
    st.sampled_from(f"{PIECES}|{MORE}".split("|")) | st.text(max_size=4), max_size=12
).map("".join)


@settings(max_examples=share(0.1))
@given(YAML)
def test_any_file(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    said = refusal(lambda: served("mask", {"config": str(file)}))
    assert said is None or "dllm" in said or "diffusion" in said
