"""What an algorithm or a model excludes is refused by the parameter's name; the rest is served."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dllm.decoding.base import ALL_BESIDE, Beside
from vllm_dllm.frontend.admission import validate_sampling_params
from vllm_dllm.settings.resolution import Served, StepDetails
from vllm_dllm.settings.server import DllmSettings

# A request's parameters, the one that is named, and what excludes it.
ASKED: list[tuple[dict[str, Any], str, Beside]] = [
    (
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        "structured_outputs",
        "constraints",
    ),
    ({"logprobs": 0}, "logprobs", "logprobs"),
    ({"logprobs": 1, "logprob_token_ids": [3]}, "logprobs", "logprobs"),
    ({"extra_args": {"diffusion_trace": True}}, "diffusion_trace", "traces"),
    ({"extra_args": {"diffusion_return_step_maps": True}}, "diffusion_return_step_maps", "traces"),
    ({"presence_penalty": 0.1}, "presence_penalty", "row_options"),
    ({"frequency_penalty": -0.1}, "frequency_penalty", "row_options"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "row_options"),
    ({"logit_bias": {3: 1.0}}, "logit_bias", "row_options"),
    ({"allowed_token_ids": [3]}, "allowed_token_ids", "row_options"),
    ({"bad_words": ["a"]}, "bad_words", "row_options"),
    ({"min_tokens": 1, "max_tokens": 2}, "min_tokens", "row_options"),
    (
        {"extra_args": {"diffusion_stream_prefix": True}},
        "diffusion_stream_prefix",
        "canvas_options",
    ),
]


def served(excludes: frozenset[Beside]) -> Served:
    """A masked model with this package's defaults."""
    return Served("mask", "LowConfidence", DllmSettings(), mask_token=1, excludes=excludes)


@pytest.mark.parametrize(("asked", "name", "beside"), ASKED)
def test_what_is_excluded_is_refused_and_nothing_else(
    asked: dict[str, Any], name: str, beside: Beside
) -> None:
    params = SamplingParams(temperature=0, **asked)
    validate_sampling_params(params, served(ALL_BESIDE - {beside}), True)
    with pytest.raises(VLLMValidationError, match=f"{name}.* cannot be combined") as error:
        validate_sampling_params(params, served(frozenset({beside})), True)
    assert error.value.parameter == name


def test_optional_calls_stay_parsed_without_their_constraint() -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a"))
    validate_sampling_params(params, served(ALL_BESIDE), True, constraint_yields=True)
    assert params.structured_outputs is None


def test_the_live_page_leaves_out_what_has_no_trace() -> None:
    params = SamplingParams(temperature=0)
    for excludes, details in (
        (ALL_BESIDE, StepDetails.NOTHING),
        (frozenset[Beside](), StepDetails.LIVE),
    ):
        found = validate_sampling_params(params, served(excludes), True, StepDetails.LIVE)
        assert found.step_details == details
