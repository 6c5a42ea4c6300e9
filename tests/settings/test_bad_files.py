"""A bad generation_config.json, field by field and as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.settings.test_bad_input import (
    STEP,
    UNIFORM,
    refusal,
)
from tests.support.strategies import ALWAYS, JSON, WILD, Number, same, share
from vllm_dllm.families.diffusion_gemma.family import DiffusionGemma
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

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
        stated = DiffusionGemma().checkpoint_settings(with_field(name, value))
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
    said = refusal(lambda: DiffusionGemma().checkpoint_settings(stated))
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
