"""Logprobs without an engine: they are what whole rows of scores would have given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.held_bytes import tensor_bytes
from tests.support.sampler import FDFO, sampler_of, slots_of, step
from vllm_dllm.decoding import StepContext, Update
from vllm_dllm.decoding.base import Algorithm, Canvas
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.engine import logprobs
from vllm_dllm.engine.contracts import Readout
from vllm_dllm.engine.logprobs import ScoreSummary, ranked, summarize
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.vllm_seams.channels import Failure, PassFlags

L, VOCABULARY = 4, 30
MASK = VOCABULARY - 1
MASKED = CanvasKind(L, VOCABULARY, MASK, aligned=True)
NOISE = CanvasKind(L, VOCABULARY, None, aligned=False)
NAMED = (7, 3, 28)


def random_rows(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows with ties, also for the first place, and with tokens that are ruled out."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCABULARY, generator=draw)
    logits[:, 11] = logits[:, 12] = logits[:, :MASK].amax(1)
    logits[:, 5] = logits[:, 6]
    logits[:, 20:24] = -torch.inf
    return logits.to(dtype)


def of_definition(rows: torch.Tensor, ids: torch.Tensor, normalizes: bool) -> torch.Tensor:
    """The scores of ids ``[rows, n]``, from whole rows in float64."""
    rows = rows.double()
    return (rows.log_softmax(-1) if normalizes else rows).gather(1, ids.long())


def assert_reported(
    found: Any, rows: torch.Tensor, tokens: torch.Tensor, asked: Any, normalizes: bool
) -> None:
    """vLLM's lists ``[rows, columns]`` have the scores and ranks that whole rows give."""
    ids, scores = torch.tensor(found.logprob_token_ids), torch.tensor(found.logprobs)
    columns = 1 + (len(asked) if isinstance(asked, tuple) else asked)
    ids, scores = ids[:, :columns], scores[:, :columns]
    assert ids.shape == (len(rows), columns)
    assert ids[:, 0].tolist() == tokens.tolist()
    wanted = of_definition(rows, ids, normalizes)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)
    if isinstance(asked, tuple):
        assert ids[:, 1:].tolist() == [list(asked)] * len(rows)
    else:
        top = rows.double().topk(asked, -1).values
        assert torch.equal(rows.double().gather(1, ids[:, 1:].long()), top)
        assert all(len(set(row)) == asked for row in ids[:, 1:].tolist())
    ranks = (rows >= rows.gather(1, tokens[:, None])).sum(1)
    assert found.sampled_token_ranks.tolist() == ranks.tolist()


def rows_by_index(count: int) -> torch.Tensor:
    """Hidden states ``[count, 1]`` that say which rows the head of `reading` gives for them."""
    return torch.arange(count, dtype=torch.float32)[:, None]


def reading(slots: SlotState, logits: torch.Tensor) -> Callable[[OptionalParts], Readout]:
    """The readout of a head that has these logits, see `rows_by_index`."""

    def rows(hidden: torch.Tensor) -> torch.Tensor:
        return logits[hidden[:, 0].long()].clone()

    if slots.kind.mask_token is not None:
        return lambda parts: MaskedReadout(rows, slots, parts)
    count = slots.kind.vocabulary
    head = Head(lambda hidden: rows(hidden).float(), count, embedding=torch.eye(count))
    return lambda parts: NoiseReadout(head, slots, parts)


class AtOnce(Algorithm):
    name = "AtOnce"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        tokens = torch.where(canvas.masked, self.choice(canvas, context), canvas.tokens)
        done = torch.ones_like(context.last)
        return Update(Canvas(tokens, torch.zeros_like(canvas.masked), canvas.fixed), done)

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return context.statistics.token


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


ASKED: dict[str, tuple[RowOptions, Any]] = {
    "three": (RowOptions(logprobs=3), 3),
    "none beside the chosen": (RowOptions(logprobs=0), 0),
    "more than there are": (RowOptions(logprobs=90), VOCABULARY),
    "named": (RowOptions(token_ids=NAMED), NAMED),
    "biased": (RowOptions(logprobs=2, logit_bias={4: 9.0}, prompt_length=L), 2),
}
# Of a masked model filters take effect on what is drawn, hence not on a greedy request's scores.
FILTERED = {"filtered": (RowOptions(logprobs=2, top_k=2, prompt_length=L), 2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperatures", [(0.0,), (0.8,), (0.0, 0.8), (0.8, 0.0)])
def test_reports_of_a_masked_model(
    mode: str, dtype: torch.dtype, temperatures: tuple[float, ...]
) -> None:
    """Each canvas commits at once, greedy ones beside others that draw."""
    every = ASKED | FILTERED
    own = [temperatures[n % len(temperatures)] for n in range(len(every))]
    options, batch = [asked for asked, _ in every.values()], range(len(every))
    slots = slots_of(MASKED, [AtOnce() for _ in every])
    slots.temperature[:], slots.samples[:] = torch.tensor(own), np.array(own) > 0
    logits, hidden = random_rows(len(every) * L, dtype), rows_by_index(len(every) * L)
    sampler = sampler_of(slots, reading(slots, logits), options, mode)
    assert not step(sampler, hidden, batch).num_sampled.any()
    output = step(sampler, hidden.flip(0), batch)
    assert output.num_sampled.tolist() == [L] * len(every)
    lists = output.logprobs_tensors.tolists()
    for n, (name, (_, asked)) in enumerate(every.items()):
        rows = logits[n * L : (n + 1) * L].clone()
        if name == "biased" and mode.startswith("processed"):
            rows = rows.float()  # as in vLLM
            rows[:, 4] += 9.0
        if own[n] and mode.startswith("processed"):
            rows = rows.float() / own[n]
            rows[:, MASK] = -torch.inf
            if name == "filtered":
                rows[rows < rows.amax(1, keepdim=True)] = -torch.inf  # two are as likely
        tokens = output.sampled_token_ids[n]
        assert_reported(lists.slice_request(n, L), rows, tokens, asked, mode.endswith("logprobs"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("read_only", [False, True])
def test_reports_of_a_model_of_noise(mode: str, temperature: float, read_only: bool) -> None:
    """At the step's temperature; greedy and read-only requests report logits as they are."""
    options = [asked for asked, _ in ASKED.values()]
    slots = slots_of(NOISE, [EntropyBound() for _ in options], temperature)
    slots.max_steps.fill_(1)
    slots.read_only.fill_(read_only)
    slots.fixed[:, 1] = True  # a pinned position keeps its token
    policy = replace(FDFO, in_place=False)
    batch, logits = range(len(options)), random_rows(len(options) * L)
    sampler = sampler_of(slots, reading(slots, logits), options, mode, policy)
    hidden = rows_by_index(len(logits))
    output = step(sampler, hidden, batch)
    if not read_only:
        assert not output.num_sampled.any()
        output = step(sampler, hidden.flip(0), batch)
    assert output.num_sampled.tolist() == [L] * len(options)
    lists = output.logprobs_tensors.tolists()
    # Of a schedule of four steps this was the first.
    divisor = 0.8 * temperature if temperature and not read_only else 1.0
    for n, (name, (_, asked)) in enumerate(ASKED.items()):
        rows = logits[n * L : (n + 1) * L].clone()
        rows[:, 4] += 9.0 * (name == "biased")
        found, tokens = lists.slice_request(n, L), output.sampled_token_ids[n]
        assert_reported(found, rows / divisor, tokens, asked, mode.endswith("logprobs"))


class Elsewhere(AtOnce):
    """Decides for a token that it was not given."""

    name = "Elsewhere"

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return (context.statistics.token + 1) % MASK


class Asking(Elsewhere):
    """Decides for the first token that it has asked for."""

    name = "Asking"

    def ask(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return torch.tensor([8, 9]).expand(2, L, 2)

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return torch.full_like(canvas.tokens, 8)


def two_steps(algorithm: Algorithm, *asked: RowOptions | None) -> tuple[Any, SlotState]:
    slots = slots_of(MASKED, [algorithm] * len(asked))
    logits = random_rows(len(asked) * L)
    sampler = sampler_of(slots, reading(slots, logits), asked)
    hidden = rows_by_index(len(logits))
    step(sampler, hidden, range(len(asked)))
    return step(sampler, hidden, range(len(asked))), slots


def test_a_token_that_was_not_read_ends_its_request() -> None:
    """Catches logprobs of another token. Who asks for no logprobs is not affected."""
    output, slots = two_steps(Elsewhere(), RowOptions(logprobs=1), None)
    assert slots.failure.tolist() == [Failure.UNREAD_TOKEN, Failure.NONE]
    assert output.num_nans.tolist() == [
        Failure.UNREAD_TOKEN,
        -(PassFlags.COMMITTED | PassFlags.LEFT),
    ]
    assert output.num_sampled.tolist() == [0, L]


def test_a_token_that_was_asked_for_is_reported() -> None:
    output, slots = two_steps(Asking(), RowOptions(logprobs=1), RowOptions(logprobs=2))
    assert not slots.failure.any()
    assert output.sampled_token_ids.unique().tolist() == [8]
    for n, asked in enumerate((1, 2)):
        rows = random_rows(2 * L)[n * L : (n + 1) * L]
        found = output.logprobs_tensors.tolists().slice_request(n, L)
        assert_reported(found, rows, output.sampled_token_ids[n], asked, True)


class MasksAgain(AtOnce):
    """Decides all positions, and masks the first one again with a token of its own."""

    name = "MasksAgain"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        update = super().step(canvas, context)
        first = torch.arange(L) == 0
        tokens = torch.where(first, (update.canvas.tokens + 1) % MASK, update.canvas.tokens)
        return Update(
            Canvas(tokens, first.expand_as(canvas.masked), canvas.fixed), ~update.done, {}
        )


def test_a_masked_position_may_hold_any_token() -> None:
    assert not two_steps(MasksAgain(), RowOptions(logprobs=1))[1].failure.any()


def test_neighbours_that_ask_for_nothing_take_no_rows() -> None:
    """Only rows of those who ask are reported, and each finds its own."""
    asked = [None, RowOptions(logprobs=2), None, RowOptions(logprobs=1), RowOptions(top_k=2)]
    output, _ = two_steps(AtOnce(), *asked)
    assert output.logprobs_tensors.logprobs.shape == (2 * L, 3)
    lists = output.logprobs_tensors.tolists()
    for n, most in ((1, 2), (3, 1)):
        rows = random_rows(5 * L)[n * L : (n + 1) * L]
        found = lists.slice_request(n, L)
        assert_reported(found, rows, output.sampled_token_ids[n], most, True)
    assert two_steps(AtOnce(), None, RowOptions(top_k=2))[0].logprobs_tensors is None


@pytest.mark.parametrize("kind", [MASKED, NOISE], ids=["masked", "noise"])
def test_what_is_held_does_not_depend_on_the_vocabulary(kind: CanvasKind) -> None:
    """Catches whole rows that live until logprobs are reported: 16 GiB at published sizes."""
    held = []
    for vocabulary in (100, 1000):
        mask = None if kind.mask_token is None else vocabulary - 1
        slots = slots_of(
            CanvasKind(L, vocabulary, mask, kind.aligned),
            [EntropyBound() if mask is None else AtOnce()] * 3,
            temperature=0.9,
        )
        logits = torch.randn(3 * L, vocabulary, generator=torch.Generator().manual_seed(1))
        asked = RowOptions(logprobs=5, logit_bias={0: -1.0}, prompt_length=L)
        sampler = sampler_of(slots, reading(slots, logits), [asked] * 3)
        reports = sampler.parts.logprobs
        observe = reports.observe

        def watched(*args: Any) -> None:
            held.append(own_bytes(reports))  # noqa: B023
            observe(*args)  # noqa: B023
            held.append(own_bytes(reports))  # noqa: B023

        reports.observe = watched
        step(sampler, rows_by_index(3 * L), range(3))
    assert held[:2] == held[2:]
    assert held[0] > 0


def own_bytes(reports: logprobs.LogprobReports) -> int:
    shared = ("slots", "rows")
    return tensor_bytes([value for name, value in vars(reports).items() if name not in shared])


# ---- What is kept of rows


def test_rows_are_summarized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a summary for which all rows of a canvas are in float32 together."""
    rows, candidates = random_rows(10), torch.arange(10)[:, None]
    whole = ScoreSummary.from_scores(rows, candidates, 2, True, ranked)
    sizes = []

    def scores_of(index: int, positions: slice) -> torch.Tensor:
        sizes.append(len(rows[positions]))
        return rows[positions]

    monkeypatch.setattr(logprobs, "SUMMARY_BYTES_CPU", 4 * 4 * VOCABULARY + 3)
    parts = summarize(scores_of, candidates[None], [0], (2, True, ranked), 4 * VOCABULARY)
    assert sizes == [4, 4, 2]
    for name, tensor in vars(whole).items():
        assert torch.equal(getattr(parts, name)[0], tensor), name
