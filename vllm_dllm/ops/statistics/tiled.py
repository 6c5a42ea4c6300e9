"""The statistics of `sampled`, and the soft embedding, computed over tiles of the vocabulary.

One pass computes one tile at a time. It keeps running maxima, a running sum of exponentials and a
running sum of embeddings, which are rescaled whenever the maximum grows (online softmax; Milakov
and Gimelshein, 2018). Peak memory is that of one tile, whatever the size of the vocabulary. If the
head is spread over ranks, each rank passes over its own ids, and ranks exchange only results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, TypeVar

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import (
    GROUP,
    LeadingGroup,
    SoftmaxPartials,
    add_product,
    group_noise,
    grouped,
    soft_embedding,
)
from vllm_dllm.ops.statistics.rows import SampledStatistics

# Statistics [rows], and the soft embedding [rows, hidden], if there is one.
Result = tuple[SampledStatistics, torch.Tensor | None]

Function = TypeVar("Function", bound=Callable[..., Any])

# How many float32 tensors of a tile's size are alive together in one pass: scaled logits, their
# distance to the maximum, weights, and a copy of the logits if the last group is incomplete.
TILE_COPIES = 4
MAX_ROWS = 2048
# Weights below exp(FAR) are raised to it. It is negligible against a row's sum (at least 1), and
# still a normal float32: denormal numbers make a CPU many times slower.
FAR = -87.0


def tile_shape(rows: int, vocabulary: int, budget: int) -> tuple[int, int]:
    """The tile (rows, ids) whose float32 temporaries take at most `budget` bytes.

    The ids are whole groups, or the whole vocabulary. A tile has at least one group, even where
    that exceeds the budget.
    """
    rows = max(1, min(rows, MAX_ROWS))
    groups = max(1, budget // tile_bytes(rows, GROUP))
    return rows, min(max(1, vocabulary), groups * GROUP)


def tile_bytes(rows: int, ids: int) -> int:
    """Bytes of float32 temporaries of a tile; with this budget `tile_shape` returns this tile."""
    return 4 * TILE_COPIES * rows * GROUP * -(-ids // GROUP)


def example_budgets(rows: int, batches: Sequence[int], head: Head, budget: int) -> list[int]:
    """The budgets that make an example's tiles as wide as those of real batches.

    There is one budget for each of `batches`, even where budgets are equal, because ranks with
    fewer ids must exchange results as often as the others.

    Args:
        rows: number of rows of the example.
        batches: numbers of rows of real batches.
        head: the head; a rank counts its own ids.
        budget: bytes that the temporaries of a real batch may take.
    """
    widths = [tile_shape(batch, len(head.ids), budget)[1] for batch in batches]
    return [tile_bytes(rows, width) for width in widths]


def tiled_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
    compile: bool = False,
) -> Result:
    """The statistics of `sampled_statistics`, computed without ever holding a row of logits.

    Args:
        hidden: ``[rows, hidden]``, at least one row.
        head: the head, see `Head`.
        temperature: float32 ``[rows]``, at least 0.
        keys: int64 ``[rows]`` or any shape with as many elements, see `keyed.row_keys`.
        budget: bytes that temporaries may take.
        compile: compile the computation of a tile. Results may then be rounded differently.

    Returns:
        The same on all ranks: statistics of the shape of `keys`, and ``distribution @ embedding``
        (float32 ``[rows, hidden]``), or None without an embedding.
    """
    flat = keys.reshape(-1)
    own = head.vocabulary if head.shard is None else len(head.ids)
    at_once, ids = tile_shape(len(hidden), own, budget)
    rows = (hidden, temperature, flat)
    parts = []
    chunks = zip(*(tensor.split(at_once) for tensor in rows), strict=True)
    for hidden_rows, temperatures, row_keys in chunks:
        parts.append(_of_rows(hidden_rows, temperatures, row_keys, head, ids, compile))
    statistics = parts[0][0]
    if len(parts) > 1:
        statistics = SampledStatistics.join([part for part, _ in parts])
    if keys.ndim > 1:
        shaped = map(methodcaller("view", keys.shape), vars(statistics).values())
        statistics = SampledStatistics(*shaped)
    if head.embedding is None or len(parts) == 1:
        return statistics, parts[0][1]
    return statistics, torch.cat([soft for _, soft in parts if soft is not None])


def _of_rows(
    hidden: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    head: Head,
    ids: int,
    compile: bool,
) -> Result:
    """The result for rows that are computed together, in tiles of ``ids`` ids."""
    if head.shard is None and ids == head.vocabulary:
        only_tile = _compilable(_only_tile, compile)
        statistics, total, weight = only_tile(head.logits(hidden, 0, ids), temperature, keys)
        if head.embedding is None:
            return statistics, None
        soft = weight.new_zeros((len(weight), head.embedding.shape[1]))
        soft = add_product(soft, weight[:, :ids], head.embedding)
        return statistics, soft_embedding(head, statistics, temperature == 0, soft, total)
    width = 0 if head.embedding is None else head.embedding.shape[1]
    running = _Running(temperature, keys, width)
    for first in head.ids[::ids]:
        end = min(first + ids, head.ids.stop)
        starts = torch.arange(first, end, GROUP, device=keys.device)
        # A narrower last tile is not worth a separate graph.
        fold = _compilable(_fold, compile and end - first == ids)
        # Assigning the weights to a name would keep them alive during the next tile.
        running.embed(fold(running, head.logits(hidden, first, end), starts), head.part(first, end))
    return running.result(head)


def _compilable(function: Function, compile: bool) -> Function:
    return compiled(function) if compile else function


def _fold(running: _Running, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Fold one tile of several into the running state; this function may be compiled.

    The caller adds the soft embedding, a product of matrices that the compiler would copy.
    """
    return running.add(logits, starts)


def _only_tile(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor, torch.Tensor]:
    """The statistics from a single tile of all ids; this function may be compiled.

    This also returns each row's sum of weights and the weights of the ids. As for `_fold`, the soft
    embedding is left to the caller.
    """
    running = _Running(temperature, keys)
    starts = torch.arange(0, logits.shape[1], GROUP, device=keys.device)
    weight = running.add(logits, starts)
    return SoftmaxPartials.of(running).statistics(running.greedy), running.sum, weight


def _no_group(rows: int, device: torch.device) -> LeadingGroup:
    """The leading groups before the first tile: no group yet, with score -inf."""
    return LeadingGroup(
        torch.full((rows,), -torch.inf, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows, GROUP), -torch.inf, device=device),
    )


class _Running:
    """The state of one pass over the vocabulary, for some rows.

    `width` is that of the soft embedding, 0 for none.
    """

    def __init__(self, temperature: torch.Tensor, keys: torch.Tensor, width: int = 0) -> None:
        rows, device = len(keys), keys.device
        self.keys = keys
        self.greedy = temperature == 0
        self.divisor = torch.where(self.greedy, 1.0, temperature)[:, None]
        self.likeliest, self.drawn = _no_group(rows, device), _no_group(rows, device)
        self.sum = torch.zeros(rows, device=device)
        self.weighted = torch.zeros(rows, device=device)
        self.shrink = torch.ones(rows, device=device)  # of the sums, by the last tile
        self.soft = torch.zeros((rows, width), device=device)

    def add(self, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Fold in a tile of logits ``[rows, ids]``, which is overwritten.

        `starts` int64 ``[groups]`` are the first ids of the tile's groups. Returns the weights of
        the ids, ``[rows, groups * GROUP]``.
        """
        before = self.likeliest.score
        groups = grouped(logits.div_(self.divisor))
        self.likeliest.compete(groups.amax(-1), groups, starts)
        # Sums are relative to the running maximum, or to 0 in a row that has so far had only -inf.
        origin = torch.where(self.likeliest.score == -torch.inf, 0.0, self.likeliest.score)
        distance = (groups - origin[:, None, None]).clamp_min_(FAR)
        weight = distance.exp()  # [rows, groups, GROUP]
        mass = weight.sum(-1)
        noise = group_noise(self.keys, starts)
        self.drawn.compete(mass.log() + origin[:, None] + noise, groups, starts)
        # This is done in place: the distances are no longer needed, and a copy would be a tile
        # wide.
        weighted = distance.mul_(weight).flatten(1).sum(-1)
        # The sums' origin moves up from the last maximum.
        self.shrink = torch.exp(before - origin)
        moved = torch.where(before == -torch.inf, 0.0, before - origin)
        self.weighted = self.shrink * (self.weighted + self.sum * moved) + weighted
        self.sum = self.sum * self.shrink + mass.sum(-1)
        return weight.flatten(1)

    def embed(self, weight: torch.Tensor, embedding: torch.Tensor | None) -> None:
        """Add the weights that `add` returned, multiplied by the embedding of the tile's ids."""
        if embedding is not None:
            self.soft.mul_(self.shrink[:, None])
            self.soft = add_product(self.soft, weight[:, : len(embedding)], embedding)

    def result(self, head: Head) -> Result:
        """The statistics and soft embedding of all ids, including those of other ranks."""
        greedy, partials = self.greedy, SoftmaxPartials.of(self)
        if head.shard is not None:
            partials = partials.merge_ranks(head.shard)
        statistics = partials.statistics(greedy)
        if head.embedding is None:
            return statistics, None
        return statistics, soft_embedding(head, statistics, greedy, partials.soft, partials.sum)
