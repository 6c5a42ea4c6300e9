"""The contract of a decoding algorithm, which is a pure function of tensors.

It sees one canvas per row and knows nothing about requests, batches, caches or phases. The state
that it keeps between steps is passed in and returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch

from vllm_dllm.ops.statistics.rows import RankedTokens, RowStatistics
from vllm_dllm.ranges import AlgorithmConfig

Corruption = Literal["mask", "uniform"]
# What a request may ask for beside its text: a constraint; logprobs; records of its steps; biases,
# penalties and other changes to logits; and options that fix or read positions of a canvas.
Beside = Literal["constraints", "logprobs", "traces", "row_options", "canvas_options"]
ALL_BESIDE: frozenset[Beside] = frozenset(get_args(Beside))
# A drawn token's confidence is its probability after the temperature, or after top-k and top-p too.
DrawConfidence = Literal["tempered", "filtered"]


@dataclass(frozen=True)
class EditTokens:
    """The ids with which a model changes the layout of a canvas."""

    mask: int  # fills positions that are still to be decided
    delete: int  # predicted for a position that is to be removed
    split: int  # predicted for a position before which a mask is to be inserted


@dataclass(frozen=True)
class Canvas:
    """One canvas per row; a token id never implies that a position is masked."""

    tokens: torch.Tensor  # int64 [slots, L], the ids that the model reads
    masked: torch.Tensor  # bool [slots, L], positions that are still to be decided
    fixed: torch.Tensor  # bool [slots, L], positions that never change (the prompt's tail)

    def take(self, index: torch.Tensor) -> Canvas:
        """Copies of the canvases of the slots in ``index``, int64 ``[n]``."""
        parts = (self.tokens, self.masked, self.fixed)
        return Canvas(*(part.index_select(0, index) for part in parts))


@dataclass(frozen=True)
class StepContext:
    """The inputs of a step other than the canvas.

    Attributes:
        statistics: row statistics ``[slots, L]`` of a forward pass over the canvas; with samples
            (`SampledStatistics`) for an algorithm of uniform noise.
        last: bool ``[slots]``, true where the step cap is reached and everything must be decided.
        parameters: the fields of the algorithm's `config`, as float32 ``[slots]`` tensors.
        state: what the algorithm's last step returned for these slots, or the initial values.
        step: int64 ``[slots]``, the steps that the canvas has taken before this one.
        noise: int64 ``[slots, L]``, uniform random tokens, for an algorithm of uniform noise.
        present: bool ``[slots, L]``, positions that exist; None when all do. Only canvases
            narrower than L have positions that do not exist, whose statistics are meaningless.
        asked: float32 ``[slots, L, K]``, log-probabilities of the ids that `ask` named.
        likeliest: ``[slots, L, K]``, the tokens that `Algorithm.likeliest` asks for; K may be
            larger, because another algorithm of the batch has asked for more.
        edit_tokens: the model's ids for `Algorithm.moves`, or None.
        forces: bool ``[slots]``, false where nothing is decided of which the algorithm is not sure;
            None where that is nowhere. Only for an algorithm that is `in_blocks`.
        blocks: for `decoding.blocks`; None where canvases have one block.
    """

    statistics: RowStatistics
    last: torch.Tensor
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    step: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    present: torch.Tensor | None = None
    asked: torch.Tensor | None = None
    likeliest: RankedTokens | None = None
    edit_tokens: EditTokens | None = None
    forces: torch.Tensor | None = None
    blocks: BlockLimits | None = None


@dataclass(frozen=True)
class BlockLimits:
    """The limits of canvases of several blocks, int64 ``[slots]`` each, see `decoding.blocks`."""

    open_blocks: torch.Tensor  # how many unfinished blocks may be open
    max_steps: torch.Tensor  # the cap on the steps of a block


@dataclass(frozen=True)
class Update:
    """The result of one step of an algorithm.

    Attributes:
        canvas: the canvas that the model reads next, or that is committed where `done` is true.
        done: bool ``[slots]``, true where the algorithm has finished the canvas. If the canvas
            equals the one that was read, this forward pass was its commit.
        state: the tensors named in `Algorithm.state`, for the next step.
    """

    canvas: Canvas
    done: torch.Tensor
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an algorithm keeps for each slot while a canvas is denoised."""

    dtype: torch.dtype  # its dtype
    initial: float  # the value before the first step of a canvas
    per_position: bool = True  # whether the shape is [slots, L, *extra] rather than [slots, *extra]
    extra: tuple[int, ...] = ()  # additional dimensions


class Algorithm(ABC):
    """A decoding algorithm: a name, its settings, its per-slot tensors, and one pure step.

    Attributes:
        name: what users write.
        corruption: what it removes from a canvas: masks or uniform noise. A model has one of the
            two.
        config: its settings; each may be chosen per request.
        presets: named settings, used as ``<name>-<preset>``.
        state: per-slot tensors between the steps of a canvas; the engine stores them.
        edits: whether it may change decided positions, so no part of a canvas is final before
            `done`.
        reads_decided: whether it reads statistics of decided positions. If not, those are
            meaningless, and a CPU does not compute them.
        reads_entropy: whether it needs the entropies of the rows.
        samples: whether it also works with drawn tokens in place of the most likely ones.
        own_confidence: whether a drawn token's confidence is its own probability at temperature 1
            rather than the one from `ops.statistics.sampled.with_drawn`.
        verifies: whether a causal commit decides how much of a canvas leaves. Its canvases begin
            with the last known token, see `engine.verifying_pass`, and `reads_decided` is true.
        in_blocks: whether it can decide several blocks of a canvas in one pass, see
            `decoding.blocks`. It obeys `StepContext.forces`, as `reveal` does, neither edits nor
            verifies, and has only statistics, parameters, state and the step to go by.
        excludes: what its requests cannot ask for; they are refused by name.
        likeliest: how many of the likeliest tokens it needs for each position; 0 if the statistics
            are enough.
        moves: whether it may move tokens to other positions. It then needs a model with
            `EditTokens`, and a position that is decided may be a masked one again.
    """

    name: str
    corruption: Corruption = "mask"
    config: type[AlgorithmConfig] = AlgorithmConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    state: Mapping[str, StateTensor] = MappingProxyType({})
    edits: bool = False
    reads_decided: bool = True
    reads_entropy: bool = False
    samples: bool = True
    own_confidence: bool = False
    verifies: bool = False
    in_blocks: bool = False
    excludes: frozenset[Beside] = frozenset()
    likeliest: int = 0
    moves: bool = False

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """The default maximum number of steps for a canvas of `length` positions."""
        return length + 1

    def temperature(
        self,
        temperature: torch.Tensor,
        progress: tuple[torch.Tensor, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The temperature at which a step's logits are sampled, float32 ``[slots]``.

        0 is greedy, and the result is 0 where a request's temperature is 0.

        Args:
            temperature: the requests' temperatures, float32 ``[slots]``.
            progress: the number of steps taken before this one, and the number of steps of the
                schedule, int64 ``[slots]`` each.
            parameters: as in `StepContext`.
        """
        return temperature

    def adjust(
        self, canvas: Canvas, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A change to one logit in each row before statistics are computed, or None.

        It is the tokens' ids, int64 ``[slots, L]``, and what to add to their logits, float32
        ``[slots, L]``.
        """
        return None

    def ask(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The ids whose log-probabilities the step needs, int64 ``[slots, L, K]``, or None."""
        return None

    @abstractmethod
    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """Update every canvas, without waiting for the device and without a loop over slots.

        At each position the new canvas holds one of these: the token that the canvas has there, the
        `token` or `sample` of the statistics, the random token in `context.noise`, or an id that
        `ask` named there. Logprobs are read only for these, so a request that asks for logprobs
        ends with an error if a position that is not masked gets any other token.
        """


def confidence(canvas: Canvas, probability: torch.Tensor) -> torch.Tensor:
    """``probability`` ``[slots, L]`` where masked, and -1 (below every probability) elsewhere."""
    return torch.where(canvas.masked, probability, -1.0)


def precedes(sureness: torch.Tensor) -> torch.Tensor:
    """Whether position j comes before i, the surest first: bool ``[slots, L, L]`` at ``[_, i, j]``.

    `sureness` is float32 ``[slots, L]``; ties go to the lowest position. Comparing all pairs costs
    a GPU one kernel, and sorting several.
    """
    one, other = sureness[:, :, None], sureness[:, None, :]
    place = torch.arange(sureness.shape[1], device=sureness.device)
    return (other > one) | ((other == one) & (place < place[:, None]))


def reveal(
    canvas: Canvas,
    context: StepContext,
    accept: torch.Tensor,
    *,
    token: torch.Tensor | None = None,
    probability: torch.Tensor | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Update:
    """Decide the masked positions in ``accept`` (bool ``[slots, L]``), but at least one of them.

    If `accept` has no masked position, the most probable one is decided, unless `context.forces`
    is false there; ties go to the lowest position. At the step cap all masked positions are
    decided. `token` and `probability` (``[slots, L]``) default to those of the statistics; `state`
    is returned with the update.
    """
    token = context.statistics.token if token is None else token
    probability = context.statistics.probability if probability is None else probability
    accept = accept & canvas.masked
    surest = confidence(canvas, probability).argmax(1, keepdim=True)
    alone = torch.zeros_like(accept).scatter_(1, surest, True)
    if context.forces is not None:
        alone = alone & context.forces[:, None]
    accept = torch.where(accept.any(1, keepdim=True), accept, alone)
    accept = (accept | context.last[:, None]) & canvas.masked
    masked = canvas.masked & ~accept
    tokens = torch.where(accept, token, canvas.tokens)
    return Update(Canvas(tokens, masked, canvas.fixed), ~masked.any(1), state or {})
