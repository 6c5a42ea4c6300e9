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

# Row counts that fill each tile, and a few groups of ids, the last one incomplete.
ROWS = TILE_ROWS
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
    for rows in ROWS:
        case = _Case(head, rows)
        checks = case.masked() if masked else case.noise()
        if rows == ROWS[0]:
            checks = chain(checks, case.options())
        failed += [f"{name} of {rows} rows" for name, passed in checks if not passed]
    return failed


class _Case:
    """Hidden states and a head of few ids, whose `logits` round exact sums."""

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
        own = replace(head, vocabulary=IDS, shard=None, logits=self._logits)
        self.head = replace(own, weight=weight, embedding=grid(IDS, width, spread=1))
        self.temperature = (torch.arange(rows) % 4 / 3).to(device)
        self.keys = row_keys(torch.arange(rows), rows).to(device)

    def _logits(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """See `Head.logits`."""
        values, cap = self._products(hidden, first, end).float(), self.head.soft_cap
        return values if cap is None else values.div_(cap).tanh_().mul_(cap)

    def _products(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """The logits in the head's dtype, before the soft cap."""
        weight = self.head.weight
        assert weight is not None
        return (hidden.double() @ weight[first:end].double().T).to(weight.dtype)

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
        plain = LogitRows(self._products(self.hidden, 0, IDS), 4, self.head.soft_cap)
        want = self._logits(self.hidden, 0, IDS)
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
        scores = self._logits(self.hidden, 0, IDS)
        starts = group_starts(0, IDS, scores.device)
        found, weights = sampled_partials(scores, self.temperature, self.keys, starts)
        mean = plain_soft_embedding(weights, self.head, self.temperature, found, found)
        logits = self._products(self.hidden, 0, IDS)
        rows = LogitRows(logits, len(logits), self.head.soft_cap)
        partials = logits_statistics(rows, None, self.temperature, self.keys)
        want = found.sampled_statistics(greedy)
        yield from _compared("rows", partials.sampled_statistics(greedy), want)
        soft = soft_embedding(rows, self.head, self.temperature, partials)
        assert self.head.embedding is not None
        budget = SOFT_BUDGET[self.head.embedding.element_size() == 2]
        error = (soft - mean).abs().max() / self.head.embedding.float().abs().max()
        yield "soft embedding", bool(error <= budget)

    def masked(self) -> Iterator[tuple[str, bool]]:
        """The kernels of a masked model."""
        logits = self._logits(self.hidden, 0, IDS)
        want = row_statistics(logits.clone(), FORBIDDEN, entropy=True)
        for name, partials in (
            ("head", head_statistics(self.hidden, self.head, forbidden=FORBIDDEN)),
            ("rows", logits_statistics(LogitRows(logits, len(logits)), FORBIDDEN)),
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
