"""SelfSpeculative: a masked model reads its own draft again, from left to right, to accept it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    Algorithm,
    Beside,
    Canvas,
    DraftContext,
    StateTensor,
    StepContext,
    Update,
    reveal,
)
from vllm_dllm.ops.statistics.rows import EntropyStatistics
from vllm_dllm.ranges import MAX_STEPS, AlgorithmConfig, setting


@dataclass(frozen=True)
class SelfSpeculativeConfig(AlgorithmConfig):
    """Settings of `SelfSpeculative`; the defaults are those published for SDAR's blocks of 4."""

    threshold: float = setting(0.85, "decide what is surer than this where nothing is verified")
    least_span: int = setting(1, "verify runs of at least this many masks", least=1, whole=True)
    least_score: float = setting(0.0, "verify runs of at least this score", least=-MAX_STEPS)
    cost: float = setting(1.0, "what the score of a run is lowered by")
    cost_per_sure: float = setting(0.0, "and for each mask that is surer than the threshold")
    entropy_weight: float = setting(1.0, "how much an uncertain mask lowers the score of its run")
    ratio_power: float = setting(1.0, "exponent of the ratio by which a token is accepted")


class SelfSpeculative(Algorithm):
    """S2D2: threshold decoding, of which some steps have their draft verified by a second pass.

    A first pass drafts x with the probabilities p and entropies h. Of the first run of masks,
    k = 1 ... n from left to right, it expects to keep, and so scores::

        kept = a_1 + a_1 a_2 + ... + a_1 ... a_n,   a_k = exp(-entropy_weight h_k / ln(vocabulary))
        score = kept - cost - cost_per_sure |{i in M : p_i > threshold}|

    If ``n >= least_span`` and ``score >= least_score``, nothing is decided, and a second pass reads
    the draft: its q_k is the distribution at a mask in place k that sees the tokens before it and
    not those after it, as if blocks had one position. With u_k uniform random numbers, x_k is
    accepted while::

        u_k < (q_k(x_k) / p_k) ^ ratio_power

    and the first that is not becomes the likeliest token of q_k. Otherwise the first pass decides
    as `LowConfidence` does. Keys and values of the second pass are dropped.

    Random numbers depend on the request's seed, so answers are reproducible, but they decide at
    temperature 0 as well. The published rule draws a rejected token from ``max(0, q - p)``, which
    would take the draft's whole distribution at every position; and it may also decide masks after
    the rejected one. Its settings for LLaDA2.1 (the presets) edit decided tokens, too.

    Source: ``generate_ssd_policy.py`` of S2D2 (phymhan/S2D2, arXiv 2603.25702).
    """

    name: str = "SelfSpeculative"
    config: type[AlgorithmConfig] = SelfSpeculativeConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType(
        {
            "Always": {"least_score": -MAX_STEPS},  # SDAR's blocks of 16
            "Conservative": {"threshold": 0.95, "least_score": -5.0, "cost": 4.0},
            "Quality": {"threshold": 0.7, "cost": 4.0},
        }
    )
    state: Mapping[str, StateTensor] = MappingProxyType(
        {
            "draft": StateTensor(torch.int64, initial=0),
            "probability": StateTensor(torch.float32, initial=1.0),
        }
    )
    reads_decided: bool = False
    reads_entropy: bool = True
    samples: bool = False
    verifies_drafts: bool = True
    excludes: frozenset[Beside] = frozenset({"constraints"})

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """See `Algorithm.cap`: a position may take two passes."""
        return 2 * length + 1

    def ask(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """See `Algorithm.ask`: the drafted tokens."""
        return state["draft"][..., None]

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        draft, statistics, asked = context.draft, context.statistics, context.asked
        if draft is None or asked is None or not isinstance(statistics, EntropyStatistics):
            raise TypeError("SelfSpeculative needs entropies and the probabilities of its draft")
        parameters = {name: value[:, None] for name, value in context.parameters.items()}
        run = first_run(canvas.masked)
        sure = canvas.masked & (statistics.probability > parameters["threshold"])
        loss = parameters["entropy_weight"] * statistics.entropy / math.log(draft.vocabulary)
        price = context.parameters["cost_per_sure"] * sure.sum(1)
        score = expected_length(run, loss) - context.parameters["cost"] - price
        verify = (run.sum(1) >= context.parameters["least_span"]) & run.any(1)
        verify = verify & (score >= context.parameters["least_score"])
        verify = verify & ~(draft.verified | context.last)

        ratio = asked[..., 0].exp() / context.state["probability"]
        accepted = leading(run, draft.chance < ratio ** parameters["ratio_power"])
        decided, token = verified(run, accepted, draft, statistics.token)
        update = reveal(
            canvas, context, torch.where(draft.verified[:, None], decided, sure), token=token
        )
        waits = verify[:, None]
        return Update(
            Canvas(
                torch.where(waits, canvas.tokens, update.canvas.tokens),
                torch.where(waits, canvas.masked, update.canvas.masked),
                canvas.fixed,
            ),
            update.done & ~verify,
            {"draft": statistics.token, "probability": statistics.probability},
            verify,
            statistics.token,
        )


class SelfSpeculativeExact(Algorithm):
    """Decoding with blocks of one position, several positions at a time.

    A first pass drafts the canvas. Each later pass reads the draft from left to right: with v_i the
    likeliest token at a mask in place i that sees the tokens before it and not those after it, the
    masks up to the first place where v differs from the draft are decided for v, and v is the draft
    of the masks after it.

    Every decided token is therefore the likeliest at a mask after decided tokens, and the answer
    that of decoding the positions of a block one by one, from left to right, where a position sees
    what precedes it in its block. Keys and values of finished blocks are those of the model's own
    block length, as with every other algorithm, so that all of them share the prefix cache. A cap
    (``max_steps``) below 2 L + 1 decides what is left by the draft, and is exact no more.

    Source: verification as in `SelfSpeculative`, with equality in place of the random numbers.
    """

    name: str = "SelfSpeculativeExact"
    reads_decided: bool = False
    samples: bool = False
    verifies_drafts: bool = True
    excludes: frozenset[Beside] = frozenset({"constraints"})

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """See `Algorithm.cap`."""
        return 2 * length + 1

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        draft, token = context.draft, context.statistics.token
        if draft is None:
            raise TypeError("SelfSpeculativeExact needs a draft")
        decided, _ = verified(
            canvas.masked, leading(canvas.masked, draft.tokens == token), draft, token
        )
        decided = (decided & draft.verified[:, None]) | (canvas.masked & context.last[:, None])
        masked = canvas.masked & ~decided
        tokens = torch.where(decided, token, canvas.tokens)
        verify = masked.any(1)
        return Update(Canvas(tokens, masked, canvas.fixed), ~verify, {}, verify, token)


def first_run(masked: torch.Tensor) -> torch.Tensor:
    """The first run of masks, bool ``[slots, L]``, where `masked` is of the same shape."""
    from_first = masked.cumsum(1) > 0  # the first mask, and all after it
    return masked & ((from_first & ~masked).cumsum(1) == 0)


def expected_length(run: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """How many positions of a run to expect before the first rejected one, float32 ``[slots]``.

    Args:
        run: bool ``[slots, L]``, adjacent positions.
        loss: float32 ``[slots, L]``; a position is kept with probability ``exp(-loss)``.
    """
    return (-torch.where(run, loss, 0.0)).cumsum(1).exp().masked_fill(~run, 0.0).sum(1)


def leading(among: torch.Tensor, accept: torch.Tensor) -> torch.Tensor:
    """The positions in `among` before the first one there that is not in `accept`."""
    return among & ((among & ~accept).cumsum(1) == 0)


def verified(
    among: torch.Tensor, accepted: torch.Tensor, draft: DraftContext, token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a verifying pass decides, bool ``[slots, L]``, and the tokens, int64 ``[slots, L]``.

    Args:
        among: bool ``[slots, L]``, the masks that it is about.
        accepted: bool ``[slots, L]``, those that keep the draft's token; the next one gets `token`.
        draft: the draft.
        token: int64 ``[slots, L]``, the likeliest tokens.
    """
    rest = among & ~accepted
    corrected = rest & (rest.cumsum(1) == 1)
    keeps = accepted & draft.verified[:, None]
    return accepted | corrected, torch.where(keeps, draft.tokens, token)
