"""Canvases of large constraints wait for the host, and nothing but their number of steps changes.

On a CPU the host answers before the next step. Here it answers one step late, as on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.constrained import MODELS, prompts
from tests.support.engine import Engine, engine
from vllm_dllm.engine.constraints import CanvasStarts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Objects in lists in objects, and any other property: endlessly many states.
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inside": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "inside"],
}


class Late(CanvasStarts):
    """Answers one step late, and counts the steps in which canvases waited."""

    steps = 0

    def waits(self, slots: torch.Tensor, on_host: object) -> torch.Tensor | None:
        found = super().waits(slots, on_host)  # type: ignore[arg-type]
        if found is not None:
            self.steps += int(found.sum())
        return found


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(TINY / MODELS[request.param][0], 32, max_num_seqs=8, **TEXT_ONLY_OPTIONS) as found:
        yield found


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_answers_are_those_of_a_host_that_is_never_late(running: Engine, stream: bool) -> None:
    masked = running.slots.kind.mask_token is not None
    extra = {"diffusion_stream_prefix": True} if stream and masked else {}
    params = [
        SamplingParams(
            temperature=n % 2,
            seed=n,
            max_tokens=150,
            structured_outputs=StructuredOutputsParams(json=TREE),
            extra_args=extra,
        )
        for n in range(5)
    ]
    asked = prompts(running, len(params), 3)
    expected = running.generate(asked, params)
    constraints = running.runner.model_state.parts.constraints
    usual, late = constraints.starts, Late(len(running.slots.tail), torch.device("cpu"), late=1)
    constraints.starts = late
    try:
        assert running.generate(asked, params) == expected
        assert late.steps > len(params), "canvases have waited"
    finally:
        constraints.starts = usual
    decode = running.llm.get_tokenizer().decode
    for tokens, reason in expected:
        assert reason == "stop"
        jsonschema.validate(json.loads(decode(tokens, skip_special_tokens=True)), TREE)
    running.assert_idle()
