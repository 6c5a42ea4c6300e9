"""The statistics of `sampled_stats`, and the soft embedding, over tiles of the vocabulary.

One pass over tiles that exist one at a time: running maxima, a running sum of exponentials
and a running sum of embeddings that are rescaled whenever the maximum grows (online softmax;
Milakov and Gimelshein, 2018). Peak memory is a tile's, whatever the vocabulary. With a head that
is spread over ranks each rank passes over its own ids, and only the results meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import Found
from vllm_dllm.ops.statistics.sampled import (
    GROUP,
    SampledStatistics,
    draw_in_group,
    group_noise,
    group_starts,
    grouped,
    take_group,
)

# Statistics [rows], and the soft embedding [rows, hidden] where there is one.
Result = tuple[SampledStatistics, torch.Tensor | None]
# (hidden, head, temperature, keys, bytes) to that, as `tiled_statistics`.
Tiled = Callable[[torch.Tensor, Head, torch.Tensor, torch.Tensor, int], Result]

# Float32 values of a tile's size that are alive together in one pass (scaled logits, their
# distance to the maximum, weights, and a temporary).
TILE_COPIES = 4
MAX_ROWS = 2048
# Weights below exp(FAR) count as that: 0 against a row's sum (at least 1), and still a normal
# float32; denormal ones make a CPU many times slower.
FAR = -87.0


def tile_shape(rows: int, vocabulary: int, budget: int) -> tuple[int, int]:
    """(rows, ids) that may be in flight together within `budget` bytes of float32 temporaries.

    Ids are whole groups, or all of them; a budget below one group is exceeded by as much.
    """
    rows = max(1, min(rows, MAX_ROWS))
    groups = max(1, budget // tile_bytes(rows, GROUP))
    return rows, min(max(1, vocabulary), groups * GROUP)


def tile_bytes(rows: int, ids: int) -> int:
    """The budget for which `tile_shape` gives tiles of so many rows and ids."""
    return 4 * TILE_COPIES * rows * GROUP * -(-ids // GROUP)


def example_budgets(rows: int, batches: Sequence[int], head: Head, budget: int) -> list[int]:
    """For each of `batches`, the budget with which `rows` rows take tiles as wide as its own.

    One for each even where they are the same: ranks with fewer ids must meet the others as often.

    Args:
        rows: of the example.
        batches: numbers of rows that `budget` is for.
        head: the head; a rank sees its own ids.
        budget: bytes that temporaries may take.
    """
    widths = [tile_shape(batch, len(head.ids), budget)[1] for batch in batches]
    return [tile_bytes(rows, width) for width in widths]


def tiled_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
) -> Result:
    """What `sampled_statistics` computes, without ever holding a row of logits.

    Args:
        hidden: ``[rows, hidden]``, at least one row.
        head: the head, see `Head`.
        temperature: float32 ``[rows]``, at least 0.
        keys: int64 ``[rows]``, see `noise.row_keys`.
        budget: bytes that temporaries may take.

    Returns:
        The same on all ranks: statistics of shape ``[rows]``, and ``distribution @ embedding``
        (float32 ``[rows, hidden]``), or None without an embedding.
    """
    return _in_tiles((hidden, temperature, keys), head, budget, _PLAIN)


def compiled_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
) -> Result:
    """`tiled_statistics` by the compiler's kernels: alike but for the rounding of floats."""
    way = _Way(compiled(_fold), compiled(_only_tile))
    return _in_tiles((hidden, temperature, keys), head, budget, way)


def _in_tiles(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], head: Head, budget: int, way: _Way
) -> Result:
    """Of hidden states, temperatures and keys."""
    at_once, ids = tile_shape(len(rows[0]), len(head.ids), budget)
    parts = []
    for hidden, temperature, keys in zip(*(of.split(at_once) for of in rows), strict=True):
        if head.shard is None and ids == head.vocabulary:
            parts.append(way.only_tile(head, head.logits(hidden, 0, ids), temperature, keys))
            continue
        running = _Running(temperature, keys, head)
        for first in head.ids[::ids]:
            end = min(first + ids, head.ids.stop)
            starts = group_starts(first, end, keys.device)
            # A narrower last tile is not worth a graph of its own.
            fold = way.fold if end - first == ids else _fold
            # No name for the weights: they would stay alive beside the next tile.
            running.embed(
                fold(running, head.logits(hidden, first, end), starts), head.part(first, end)
            )
        parts.append(running.result(head))
    statistics = SampledStatistics.join([found for found, _ in parts])
    if head.embedding is None or len(parts) == 1:
        return statistics, parts[0][1]
    return statistics, torch.cat([soft for _, soft in parts if soft is not None])


def _fold(running: _Running, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """A tile of several; what the compiler sees of it.

    The soft embedding is left to the caller: it is a product of matrices, and would be copied.
    """
    return running.add(logits, starts)


def _only_tile(
    head: Head, logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> Result:
    """A tile of all ids, from logits to results; what the compiler sees of it."""
    running = _Running(temperature, keys, head)
    weight = running.add(logits, group_starts(0, logits.shape[1], keys.device))
    running.embed(weight, head.embedding)
    return running.result(head)


@dataclass(frozen=True)
class _Way:
    """How a tile is computed: `_fold` and `_only_tile`, or what the compiler makes of them."""

    fold: Callable[[_Running, torch.Tensor, torch.Tensor], torch.Tensor]
    only_tile: Callable[[Head, torch.Tensor, torch.Tensor, torch.Tensor], Result]


_PLAIN = _Way(_fold, _only_tile)


@dataclass
class _Winner:
    """The group that is ahead in each row: its score ``[rows]``, first id, and scaled logits."""

    score: torch.Tensor
    first: torch.Tensor
    group: torch.Tensor

    @classmethod
    def none(cls, rows: int, device: torch.device) -> _Winner:
        """Before the first tile."""
        return cls(
            torch.full((rows,), -torch.inf, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows, GROUP), -torch.inf, device=device),
        )

    def meet(self, scores: torch.Tensor, groups: torch.Tensor, starts: torch.Tensor) -> None:
        """Let the groups of a tile, scores ``[rows, groups]``, compete; ties stay with the old."""
        score, at = scores.max(-1)
        better = score > self.score
        self.first = torch.where(better, starts[at], self.first)
        self.group = torch.where(better[:, None], take_group(groups, at), self.group)
        self.score = torch.maximum(self.score, score)


class _Running:
    """The state of one pass over the vocabulary, for some rows."""

    def __init__(self, temperature: torch.Tensor, keys: torch.Tensor, head: Head) -> None:
        rows, device = len(keys), keys.device
        self.keys = keys
        self.greedy = temperature == 0
        self.divisor = torch.where(self.greedy, 1.0, temperature)[:, None]
        self.likeliest, self.drawn = (_Winner.none(rows, device) for _ in range(2))
        self.sum = torch.zeros(rows, device=device)
        self.weighted = torch.zeros(rows, device=device)
        self.shrink = torch.ones(rows, device=device)  # of the sums, by the last tile
        width = 0 if head.embedding is None else head.embedding.shape[1]
        self.soft = torch.zeros((rows, width), device=device)

    def add(self, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Fold a tile in, its logits ``[rows, ids]``; returns the ids' weights, of whole groups."""
        before = self.likeliest.score
        groups = grouped(logits.div_(self.divisor))
        self.likeliest.meet(groups.amax(-1), groups, starts)
        # Sums are relative to the running maximum; a row that saw only -inf has none yet.
        origin = torch.where(self.likeliest.score == -torch.inf, 0.0, self.likeliest.score)
        distance = (groups - origin[:, None, None]).clamp_min_(FAR)
        weight = distance.exp()  # [rows, groups, GROUP]
        mass = weight.sum(-1)
        noise = group_noise(self.keys, starts)
        self.drawn.meet(mass.log() + origin[:, None] + noise, groups, starts)
        flat = weight.flatten(1)
        self._sum(before, origin, mass.sum(-1), torch.linalg.vecdot(flat, distance.flatten(1)))
        return flat

    def _sum(
        self,
        before: torch.Tensor,
        origin: torch.Tensor,
        mass: torch.Tensor,
        weighted: torch.Tensor,
    ) -> None:
        """Move the sums' origin up from the last maximum, and add a tile's sums."""
        self.shrink = torch.exp(before - origin)
        moved = torch.where(before == -torch.inf, 0.0, before - origin)
        self.weighted = self.shrink * (self.weighted + self.sum * moved) + weighted
        self.sum = self.sum * self.shrink + mass

    def embed(self, weight: torch.Tensor, embedding: torch.Tensor | None) -> None:
        """Add what `add` returned, times those rows of the embedding."""
        if embedding is not None:
            self.soft.mul_(self.shrink[:, None])
            self.soft.addmm_(weight[:, : len(embedding)], embedding.float())

    def result(self, head: Head) -> Result:
        """Statistics and soft embedding of all ids, those of other ranks included."""
        greedy, found = self.greedy, self._found()
        if head.shard is not None:
            found = found.met(head.shard)
        statistics = found.statistics(greedy)
        if head.embedding is None:
            return statistics, None
        average = found.soft / found.sum[:, None]
        soft = torch.where(greedy[:, None], head.embed(found.token), average)
        return statistics, soft if head.shard is None else head.shard.sum(soft)

    def _found(self) -> Found:
        token = self.likeliest.first + self.likeliest.group.argmax(-1)
        sample, scaled = draw_in_group(self.drawn.group, self.drawn.first, self.keys)
        return Found(
            best=self.likeliest.score,
            token=token,
            origin=self.likeliest.score,
            drawn=self.drawn.score,
            sample=sample,
            scaled=scaled,
            sum=self.sum,
            weighted=self.weighted,
            soft=self.soft,
        )
