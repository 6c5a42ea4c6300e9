"""The statistics of `sampled`, and the soft embedding, computed over tiles of the vocabulary.

One pass keeps running maxima, a running sum of exponentials and a running sum of embeddings, which
are rescaled whenever the maximum grows (online softmax; Milakov and Gimelshein, 2018). Peak memory
is that of one tile. If the head is spread over ranks, each rank passes over its own ids, and ranks
exchange only results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import (
    FAR,
    GROUP,
    SampledStatistics,
    group_starts,
    grouped,
    take_group,
)
from vllm_dllm.ops.statistics.sampled import draw_in_group, group_noise

# Statistics [rows], and the soft embedding [rows, hidden], if there is one.
Result = tuple[SampledStatistics, torch.Tensor | None]

# How many float32 tensors of a tile's size are alive together in one pass: scaled logits, their
# distance to the maximum, weights, and a copy of the logits if the last group is incomplete.
TILE_COPIES = 4
MAX_ROWS = 2048


def tile_shape(rows: int, vocabulary: int, budget: int) -> tuple[int, int]:
    """The tile (rows, ids) whose float32 temporaries take at most `budget` bytes.

    It has whole groups, at least one, or the whole vocabulary.
    """
    rows = max(1, min(rows, MAX_ROWS))
    groups = max(1, budget // tile_bytes(rows, GROUP))
    return rows, min(max(1, vocabulary), groups * GROUP)


def tile_bytes(rows: int, ids: int) -> int:
    """Bytes of float32 temporaries of a tile; with this budget `tile_shape` returns this tile."""
    return 4 * TILE_COPIES * rows * GROUP * -(-ids // GROUP)


def example_budgets(rows: int, batches: Sequence[int], head: Head, budget: int) -> list[int]:
    """The budgets that make the tiles of an example as wide as those of real batches.

    `rows` and `batches` are their numbers of rows, and `budget` is that of a real batch. There is
    one for each of `batches`, even where they are equal, because ranks with fewer ids must exchange
    results as often as the others.
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
        keys: int64 ``[rows]``, see `keyed.row_keys`.
        budget: bytes that temporaries may take.
        compile: compile the computation of a tile. Results may then be rounded differently.

    Returns:
        The same on all ranks: statistics ``[rows]``, and ``distribution @ embedding`` (float32
        ``[rows, hidden]``), or None without an embedding.
    """
    at_once, ids = tile_shape(len(hidden), len(head.ids), budget)
    chunks = zip(*(each.split(at_once) for each in (hidden, temperature, keys)), strict=True)
    parts = [_of_rows(states, warmth, key, head, ids, compile) for states, warmth, key in chunks]
    statistics = SampledStatistics.join([part for part, _ in parts])
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
        only_tile = compiled(_only_tile) if compile else _only_tile
        statistics, total, weight = only_tile(head.logits(hidden, 0, ids), temperature, keys)
        if head.embedding is None:
            return statistics, None
        soft = weight.new_zeros((len(weight), head.embedding.shape[1]))
        soft = _add_product(soft, weight[:, :ids], head.embedding)
        return statistics, _soft_embedding(head, statistics, temperature == 0, soft, total)
    width = 0 if head.embedding is None else head.embedding.shape[1]
    running = _Running(temperature, keys, width)
    for first in head.ids[::ids]:
        end = min(first + ids, head.ids.stop)
        starts = group_starts(first, end, keys.device)
        # A narrower last tile is not worth a separate graph.
        fold = compiled(_fold) if compile and end - first == ids else _fold
        # Assigning the weights to a name would keep them alive during the next tile.
        running.embed(fold(running, head.logits(hidden, first, end), starts), head.part(first, end))
    return running.result(head)


def _fold(running: _Running, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Fold one tile of several into the running state; this function may be compiled.

    The caller adds the soft embedding, a product of matrices that the compiler would copy.
    """
    return running.add(logits, starts)


def _only_tile(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor, torch.Tensor]:
    """The statistics, sums of weights and weights of a single tile of all ids; see `_fold`."""
    running = _Running(temperature, keys)
    weight = running.add(logits, group_starts(0, logits.shape[1], keys.device))
    return running.partials().sampled_statistics(running.greedy), running.sum, weight


class _LeadingGroup:
    """The group with the highest score so far in each row; before the first tile there is none."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.score = torch.full((rows,), -torch.inf, device=device)
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)  # the group's first id
        self.group = torch.full((rows, GROUP), -torch.inf, device=device)  # its scaled logits

    def compete(self, scores: torch.Tensor, groups: torch.Tensor, starts: torch.Tensor) -> None:
        """Replace the current group with a tile's best group where that has a higher score.

        `scores` are float32 ``[rows, groups]``, the other tensors are as in `_Running.add`.
        """
        score, index = scores.max(-1)
        better = score > self.score
        self.first = torch.where(better, starts[index], self.first)
        self.group = torch.where(better[:, None], take_group(groups, index), self.group)
        self.score = torch.maximum(self.score, score)


class _Running:
    """The state of one pass for some rows; `width` is that of the soft embedding, 0 for none."""

    def __init__(self, temperature: torch.Tensor, keys: torch.Tensor, width: int = 0) -> None:
        rows, device = len(keys), keys.device
        self.keys = keys
        self.greedy = temperature == 0
        self.divisor = torch.where(self.greedy, 1.0, temperature)[:, None]
        self.likeliest, self.drawn = _LeadingGroup(rows, device), _LeadingGroup(rows, device)
        # As in `SoftmaxPartials`, relative to the largest scaled logit so far.
        self.sum = torch.zeros(rows, device=device)
        self.weighted = torch.zeros(rows, device=device)
        self.shrink = torch.ones(rows, device=device)  # of the sums, by the last tile
        # The sum of the weights times the embedding.
        self.soft = torch.zeros((rows, width), device=device)

    def add(self, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Fold in a tile of logits ``[rows, ids]``, which is overwritten; returns the ids' weights.

        `starts` int64 ``[groups]`` are the first ids of the tile's groups; there are weights for
        whole groups.
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
            self.soft = _add_product(self.soft, weight[:, : len(embedding)], embedding)

    def partials(self) -> SoftmaxPartials:
        """The results over this rank's ids, each of which may be chosen."""
        likeliest, drawn = self.likeliest, self.drawn
        sample, scaled = draw_in_group(drawn.group, drawn.first, self.keys)
        return SoftmaxPartials(
            best=likeliest.score,
            token=likeliest.first + likeliest.group.argmax(-1),
            origin=likeliest.score,
            drawn=drawn.score,
            sample=sample,
            scaled=scaled,
            sum=self.sum,
            weighted=self.weighted,
        )

    def result(self, head: Head) -> Result:
        """The statistics and soft embedding of all ids, including those of other ranks."""
        own = self.partials()
        partials = own.merge_ranks(head.shard)
        statistics = partials.sampled_statistics(self.greedy)
        if head.embedding is None:
            return statistics, None
        soft = self.soft
        if head.shard is not None:
            soft = soft * torch.exp(own.origin - partials.origin)[:, None]
        return statistics, _soft_embedding(head, statistics, self.greedy, soft, partials.sum)


def _add_product(
    total: torch.Tensor, weight: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """``total + weight @ embedding`` in float32; `total` may be overwritten.

    A GPU multiplies 16-bit numbers an order of magnitude faster than float32 numbers, so there the
    weights (at most 1) are rounded to the embedding's dtype, as the model's own probabilities are.
    The products are summed in float32.
    """
    dtype = embedding.dtype
    if dtype == torch.float32 or total.device.type == "cpu":
        return total.addmm_(weight, embedding.float())
    if torch.version.hip is not None:
        # PyTorch has no product of this kind on ROCm: the sum over one tile is rounded to `dtype`.
        return total.add_(weight.to(dtype) @ embedding)
    return torch.addmm(total, weight.to(dtype), embedding, out_dtype=torch.float32)


def _soft_embedding(
    head: Head,
    statistics: SampledStatistics,
    greedy: torch.Tensor,
    soft: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """The soft embedding of all ranks, from this rank's sums of weighted embeddings.

    `soft` is the sum of this rank's weights times its embedding, and `total` that of all ranks'
    weights. A greedy row is the embedding of its likeliest token.
    """
    mean = torch.where(greedy[:, None], head.embed(statistics.token), soft / total[:, None])
    return mean if head.shard is None else head.shard.sum(mean)


def average(head: Head, distribution: torch.Tensor) -> torch.Tensor:
    """``distribution @ embedding`` over the ids of all ranks, float32 ``[rows, hidden]``.

    The distribution is float32 ``[rows, vocabulary]``.

    Raises:
        ValueError: the head has no embedding.
    """
    if head.embedding is None:
        raise ValueError("this head has no embedding")
    own = distribution[:, head.ids.start : head.ids.stop]
    soft = product(own, head.embedding)
    return soft if head.shard is None else head.shard.sum(soft)


def product(weight: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """``weight @ embedding``, float32 ``[rows, hidden]``; see `_add_product`."""
    dtype = embedding.dtype
    if dtype == torch.float32 or weight.device.type == "cpu":
        return weight.float() @ embedding.float()
    if torch.version.hip is not None:
        return (weight.to(dtype) @ embedding).float()
    return torch.mm(weight.to(dtype), embedding, out_dtype=torch.float32)
