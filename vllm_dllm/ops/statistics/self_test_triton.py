"""A check of the row-statistics kernels on the machine at hand, against PyTorch's operators.

The check uses a few rows and ids of the model's width and dtype, with planted ties. The numbers are
small multiples of 1/32, so sums of products are exact in any order and round to the same logits
everywhere. Ids must therefore be equal. Floats have the error budgets below: `rows_triton.capped`
is off by up to 2e-7 caps, and weights of a soft embedding are rounded to its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch

from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.filters_triton import read_with
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows import RowStatistics, group_starts, row_statistics
from vllm_dllm.ops.statistics.rows_triton import TILE_ROWS, head_statistics, logits_statistics
from vllm_dllm.ops.statistics.sampled import sampled_partials
from vllm_dllm.ops.statistics.sampled import soft_embedding as plain_soft_embedding
from vllm_dllm.ops.statistics.scores_triton import LogitRows
from vllm_dllm.ops.statistics.soft_embedding_triton import soft_embedding

# A few groups of ids, the last one incomplete.
IDS = 1000
# Ids from here on have the same logits as the first ids and lose every tie against them.
COPIED = 600
FORBIDDEN = 7
# Absolute error of a probability or of an entropy in nats, and of a soft embedding relative to the
# largest number of the embedding, by whether its dtype has 16 bits.
BUDGET = 2e-4
SOFT_BUDGET = {True: 2**-7, False: 2e-4}


def failures(head: Head, masked: bool) -> list[str]:
    """Run the kernels that would serve a model; returns the names of failed checks.

    Only the width, dtype and soft cap of the `head` are used. A `masked` model has a forbidden id
    and no soft embedding.
    """
    failed = []
    for rows in TILE_ROWS:
        case = _Case(head, rows)
        checks = case.masked() if masked else case.noise()
        if rows == TILE_ROWS[0]:
            checks = chain(checks, case.options())
        failed += [f"{name} of {rows} rows" for name, passed in checks if not passed]
    return failed


class _Case:
    """Hidden states and a head of few ids, whose `logits` and `scores` are rounded exact sums."""

    def __init__(self, head: Head, rows: int) -> None:
        assert head.weight is not None
        dtype, width, device = head.weight.dtype, head.weight.shape[1], head.weight.device
        draw = torch.Generator().manual_seed(rows)

        def grid(*shape: int, spread: float) -> torch.Tensor:
            numbers = torch.randn(shape, generator=draw).mul(32 * spread).round().div(32)
            return numbers.to(device, dtype)

        self.hidden = grid(rows, width, spread=1)
        weight = grid(IDS, width, spread=5 / width**0.5)
        weight[COPIED:] = weight[: IDS - COPIED]
        self.embedding = grid(IDS, width, spread=1)
        own = replace(head, vocabulary=IDS, shard=None)
        self.head = replace(own, weight=weight, embedding=self.embedding)
        self.logits = (self.hidden.double() @ weight.double().T).to(dtype)
        self.scores = self.logits.to(torch.float32, copy=True)  # after the soft cap
        if head.soft_cap is not None:
            self.scores.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        self.temperature = (torch.arange(rows) % 4 / 3).to(device)
        self.keys = row_keys(torch.arange(rows), rows).to(device)

    def options(self) -> Iterator[tuple[str, bool]]:
        """The scores after changes, and the floors of filters, of canvases of four rows."""
        draw, device = torch.Generator().manual_seed(1), self.hidden.device
        count = len(self.hidden) // 4
        own = torch.arange(count, dtype=torch.int32)
        index = torch.stack([own, own % 2, own - 1, own], 1)
        shift = torch.randn((count, IDS), generator=draw)
        shift[:, ::3] = -torch.inf
        changes = RowChanges(
            index,
            index.to(device),
            shift.to(device),
            (torch.rand((2, IDS), generator=draw) < 0.1).to(device),
            torch.tensor([[True, False] * 2, [False, True] * 2], device=device),
            torch.randint(0, 3, (count, 2, IDS), dtype=torch.int32, generator=draw).to(device),
            torch.tensor([[1.5, 0.25, -0.5]], device=device).expand(count, 3).contiguous(),
        )
        plain, want = LogitRows(self.logits, 4, self.head.soft_cap), self.scores.clone()
        changes.apply(want)
        ones = torch.ones(count, device=device)
        rows = read_with(plain, changes, (ones / 1024, ones.long() * 20, ones * 0.75))
        score = replace(rows, floor=None).whole()
        excluded = want == -torch.inf
        near = (score - want).masked_fill(excluded, 0).abs().max() <= 1e-4
        yield "scores", bool(near & (score == want).masked_select(excluded).all())
        p = want.softmax(-1)
        best, order = p.sort(-1, descending=True)
        best = torch.where((best >= best[:, :1] / 1024) & (best >= best[:, 19:20]), best, 0.0)
        before = best.cumsum(-1) - best
        kept = (best > 0) & (before < 0.75 * best.sum(-1, keepdim=True))
        found = rows.whole().gather(1, order) > -torch.inf
        # The last token may be on either side of its share, within rounding.
        yield "filters", bool(((found.sum(-1) - kept.sum(-1)).abs() <= 1).all())

    def noise(self) -> Iterator[tuple[str, bool]]:
        """The kernels of a model of uniform noise."""
        greedy = self.temperature == 0
        starts = group_starts(0, IDS, self.scores.device)
        found, weights = sampled_partials(self.scores, self.temperature, self.keys, starts)
        mean = plain_soft_embedding(weights, self.head, self.temperature, found, found)
        rows = LogitRows(self.logits.clone(), len(self.logits), self.head.soft_cap)
        partials = logits_statistics(rows, None, self.temperature, self.keys)
        want = found.sampled_statistics(greedy)
        yield from _compared("rows", partials.sampled_statistics(greedy), want)
        soft = soft_embedding(rows, self.head, self.temperature, partials)
        error = (soft - mean).abs().max() / self.embedding.float().abs().max()
        yield "soft embedding", bool(error <= SOFT_BUDGET[self.embedding.element_size() == 2])

    def masked(self) -> Iterator[tuple[str, bool]]:
        """The kernels of a masked model."""
        want = row_statistics(self.scores.clone(), FORBIDDEN, entropy=True)
        for name, partials in (
            ("head", head_statistics(self.hidden, self.head, forbidden=FORBIDDEN)),
            ("rows", logits_statistics(LogitRows(self.scores, len(self.scores)), FORBIDDEN)),
        ):
            yield from _compared(name, partials.greedy_statistics(entropy=True), want)


def _compared(kernel: str, got: RowStatistics, want: RowStatistics) -> Iterator[tuple[str, bool]]:
    """Whether each field of `got` matches `want`; NaN never matches."""
    for field, wanted in vars(want).items():
        found = getattr(got, field)
        if wanted.is_floating_point():
            yield f"{kernel}: {field}", bool((found - wanted).abs().max() <= BUDGET)
        else:
            yield f"{kernel}: {field}", bool(torch.equal(found, wanted))
