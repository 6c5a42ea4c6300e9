"""Compiled, the update of canvases is what it is as operators, whatever a batch consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from vllm_dllm.decoding import Algorithm, Canvas, StepContext, Update, registry
from vllm_dllm.engine.slots import Phase
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.engine.warm_up import compile_updates
from vllm_dllm.ops.compiled import CompiledOnce
from vllm_dllm.selftest.steps import MODELS, BareModel

pytestmark = pytest.mark.slow

LENGTH, VOCABULARY, STEPS = 32, 320, 5
LOGPROBS, STEP_MAPS = {"logprobs": 3}, {"options": {"return_step_maps": True}}
NOT_OURS = f"{__name__}:Views"


class Views(Algorithm):
    """Decides everything at its second step, and returns what it need not copy."""

    name = "Views"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        assert context.step is not None
        done = context.step > 0
        masked = canvas.masked & ~done[:, None]
        token = context.statistics.token[:, :1].expand_as(masked).int()
        tokens = torch.where(done[:, None] & canvas.masked, token, canvas.tokens.int())
        no = torch.zeros(1, 1, dtype=torch.bool).expand_as(masked)
        return Update(Canvas(tokens, no if bool(done.all()) else masked, canvas.fixed), done)


# The requests of a batch, in turns, and how many positions the last canvas lacks.
CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "alone": ([{}], 0),
    "narrow": ([{}], 3),
    "logprobs": ([LOGPROBS], 0),
    "some with logprobs": ([LOGPROBS, {}], 3),
    "step maps": ([LOGPROBS | STEP_MAPS, STEP_MAPS], 3),
}
# Of masked models, these algorithms beside the server's.
OTHERS = [{"options": {"algorithm": name}} for name in ("FixedSteps", "JointThreshold")]
OF_MASKED = CASES | {
    "another algorithm": (OTHERS[1:], 0),
    "three algorithms": ([{}, *OTHERS], 0),
    "three algorithms, logprobs": ([{}, OTHERS[0], OTHERS[1] | LOGPROBS], 3),
    "not compiled": ([{"options": {"algorithm": name}} for name in ("Credit", NOT_OURS)], 3),
    "not ours": ([{"options": {"algorithm": NOT_OURS}}], 0),
    "constrained": ([{"constrained": True}, *OTHERS], 0),
}


def model_of(name: str) -> BareModel:
    """A model of few ids and short canvases, with the same random weights each time."""
    model = MODELS[name]
    mask = None if model.kind.mask_token is None else VOCABULARY - 1
    kind = replace(model.kind, length=LENGTH, vocabulary=VOCABULARY, mask_token=mask)
    served = replace(model.served, length=LENGTH)
    small = replace(model, served=served, kind=kind, hidden=64)
    made = BareModel(small, torch.device("cpu"), triton=False, compile=False)
    made.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


# Its mixed requests are compared in `test_warm_up`, too.
GEMMA = pytest.param("DiffusionGemma", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["SDAR-1.7B", GEMMA])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[BareModel, BareModel]]:
    """The same model, uncompiled and compiled."""
    plain, compiled = model_of(request.param), model_of(request.param)
    masked = plain.slots.kind.mask_token is not None
    others = [one["options"]["algorithm"] for one in OTHERS] if masked else ["EntropyBound"]
    flags = CanvasUpdate._flags

    def without_waiting(
        update: CanvasUpdate, commits: torch.Tensor, leaves: Any, *rest: Any
    ) -> Any:
        """`PassFlags.WAITED` is set for a commit only where something is compiled."""
        return flags(update, commits, leaves, None, *rest[1:])

    # Other tests of this process know the algorithms of the package only.
    known = mock.patch.dict(registry._REGISTRY)
    with known, mock.patch.object(CanvasUpdate, "_flags", without_waiting):
        compile_updates(compiled.admission, others)
        yield plain, compiled


def taken(model: BareModel, case: str, canvases: int) -> Iterator[Any]:
    """What each of some steps has output, and what the slots hold after it."""
    requests, narrow = OF_MASKED[case]
    batch, draw = model.batch(canvases), torch.Generator().manual_seed(1)
    reports = model.parts.logprobs
    for table in (reports.ids, reports.scores, reports.ranks):
        table.zero_()  # what no step has decided is what the slot had before
    batch.cu_num_logits_np[-1] -= narrow
    batch.num_draft_tokens -= narrow
    for slot in range(canvases):
        model.admit(slot, **{"seed": slot, "temperature": 0.0} | requests[slot % len(requests)])
    model.slots.phase[:canvases] = Phase.DENOISE
    for _ in range(STEPS):
        hidden = 0.3 * torch.randn(batch.num_draft_tokens, model.hidden, generator=draw)
        output = model.sampler(hidden.bfloat16(), batch)
        slots, every = model.slots, np.arange(canvases)
        kept = [
            part.state(slots.step[part.slots])
            for part in slots.algorithms.batches(torch.from_numpy(every), every)
        ]
        held = slots.integers, slots.flags, slots.failure, slots.spoiled
        yield vars(output), [each[:canvases] for each in held], kept


def values(of: Any) -> Iterator[Any]:
    """All numbers in tensors, records, sequences and mappings."""
    if isinstance(of, torch.Tensor | np.ndarray):
        yield of
    elif is_dataclass(of):
        yield from values([getattr(of, field.name) for field in fields(of)])
    elif isinstance(of, Mapping):
        yield from values(list(of.values()))
    elif isinstance(of, Sequence) and not isinstance(of, str):
        for each in of:
            yield from values(each)


@torch.inference_mode()
@pytest.mark.parametrize("canvases", [3, 35])
@pytest.mark.parametrize("case", OF_MASKED)
def test_compiled_updates_are_the_same(
    models: tuple[BareModel, BareModel], case: str, canvases: int
) -> None:
    plain, compiled = models
    if plain.slots.kind.mask_token is None and case not in CASES:
        pytest.skip("the model has one algorithm")
    update, found = compiled.sampler.canvas_update, []
    compilable = type(update).compilable

    def watched(function: Any, compile: bool, *kind: Any) -> Any:
        form = compilable(update, function, compile, *kind)
        if compile:
            found.append(isinstance(form, CompiledOnce))
        return form

    update.compilable = watched  # type: ignore[method-assign]
    steps = zip(taken(plain, case, canvases), taken(compiled, case, canvases), strict=True)
    for want, got in steps:
        for one, other in zip(values(want), values(got), strict=True):
            torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one))
    assert found and all(found), "an update ran uncompiled"
