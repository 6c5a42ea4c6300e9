"""Refuses what a request asks for beside its text, where its algorithm or model excludes it."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.decoding.base import Beside
from vllm_dllm.frontend import called
from vllm_dllm.ranges import listed
from vllm_dllm.settings.resolution import REQUEST_PREFIX, TRACING_OPTIONS, ResolvedRequest, Served

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
BIASES = ("logit_bias", "allowed_token_ids", "bad_words")
CANVAS_OPTIONS = ("seed_canvas", "pinned", "read_only", "stream_prefix")


def refuse_excluded(
    params: SamplingParams,
    resolved: ResolvedRequest,
    served: Served,
    of_algorithm: frozenset[Beside],
) -> None:
    """Refuse what the request asks for and its algorithm or the served model excludes."""
    of_model = served.excludes
    if resolved.read_only:  # its one canvas is not followed by what the model cannot report
        of_model -= {"logprobs", "canvas_options"}
    for excluded, by in ((of_algorithm, resolved.algorithm), (of_model, "this model")):
        for beside, parameters in _asked_for(params, resolved):
            if beside in excluded and parameters:
                names = [called(parameter) for parameter in parameters]
                raise VLLMValidationError(
                    f"{listed(names)} cannot be combined with {by}; remove "
                    f"{'it' if len(names) == 1 else 'them'}"
                    + (", or choose another algorithm." if excluded is of_algorithm else "."),
                    parameter=names[0],
                )


def _asked_for(
    params: SamplingParams, resolved: ResolvedRequest
) -> Iterator[tuple[Beside, list[str]]]:
    """The parameters by which a request wants more than its text, by kind."""
    yield "constraints", ["structured_outputs"] if params.structured_outputs is not None else []
    asked = ["logprobs"] if params.logprobs is not None else []
    asked += ["logprob_token_ids"] if params.logprob_token_ids else []
    asked += [REQUEST_PREFIX + "constrained"] if resolved.constrained else []
    yield "logprobs", asked
    details = resolved.step_details
    asked = [REQUEST_PREFIX + name for name, one in TRACING_OPTIONS.items() if one & details]
    yield "traces", asked
    asked = [name for name, none in PENALTIES.items() if getattr(params, name) != none]
    asked += [name for name in BIASES if getattr(params, name)]
    yield "row_options", asked + (["min_tokens"] if params.min_tokens else [])
    values = {name: getattr(resolved, name) for name in CANVAS_OPTIONS}
    yield "canvas_options", [REQUEST_PREFIX + name for name, value in values.items() if value]
