"""Credit: a token that is predicted repeatedly is accepted before it is certain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StateTensor, StepContext, Update, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting

KEPT = 8  # credits kept per position: with beta = 0.8 a ninth would be below 0.8^8 = 0.17
NOBODY = -1


@dataclass(frozen=True)
class CreditConfig(AlgorithmConfig):
    """Settings of `Credit`."""

    threshold: float = setting(0.95, "decide what is surer than this, with its credit")
    alpha: float = setting(0.7, "how much a credit lifts a logit")
    gamma: float = setting(0.2, "exponent of a prediction's probability")
    beta: float = setting(0.8, "share of a credit that is left after a step", most=1.0)


class Credit(Algorithm):
    """LowConfidence on logits that are raised by the credit of earlier predictions.

    At each step, with x the argmax and p its probability at position i::

        C[i, v] = beta * C[i, v] + [v = x] * p^gamma
        logit'[i, v] = logit[i, v] + alpha * log(1 + C[i, v])

    and LowConfidence decides by the argmax of logit' and its softmax probability. Only predicted
    tokens have a credit, so the `KEPT` largest per position are kept, never a whole row of the
    vocabulary; ties between raised logits go to the lowest token id. A token without credit cannot
    overtake x, whose own credit is positive, so the result is exact.

    Source: CreditDecoding (arXiv 2510.06133).
    """

    name: str = "Credit"
    config: type[AlgorithmConfig] = CreditConfig
    state: Mapping[str, StateTensor] = MappingProxyType(
        {
            "ids": StateTensor(torch.int64, initial=NOBODY, extra=(KEPT,)),
            "credit": StateTensor(torch.float32, initial=0.0, extra=(KEPT,)),
        }
    )
    samples: bool = False

    def ask(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """See `Algorithm.ask`: the tokens with a credit, and id 0 in unused places."""
        return state["ids"].clamp_min(0)

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        if context.asked is None:
            raise TypeError("Credit needs the log-probabilities of the tokens with a credit")
        parameters = {name: value[:, None, None] for name, value in context.parameters.items()}
        token, p = context.statistics.token[..., None], context.statistics.probability[..., None]
        ids, credit = context.state["ids"], context.state["credit"] * parameters["beta"]
        logp = torch.where(ids == NOBODY, -torch.inf, context.asked)
        # The predicted token already has a credit, or replaces the token with the smallest one.
        known = ids == token
        smallest = credit.argmin(-1, keepdim=True)
        place = torch.where(known.any(-1, keepdim=True), known.int().argmax(-1, True), smallest)
        before = torch.where(known, credit, 0.0).sum(-1, keepdim=True)
        ids = ids.scatter(-1, place, token)
        credit = credit.scatter(-1, place, before + p ** parameters["gamma"])
        logp = logp.scatter(-1, place, p.log())

        lifted = logp + parameters["alpha"] * torch.log1p(credit)  # [slots, L, KEPT]
        total = 1 + (lifted.exp() - logp.exp()).sum(-1)
        top = lifted.amax(-1, keepdim=True)
        winner = torch.where(lifted == top, ids, torch.iinfo(torch.int64).max).amin(-1)
        probability = top[..., 0].exp() / total
        return reveal(
            canvas,
            context,
            probability > context.parameters["threshold"][:, None],
            token=winner,
            probability=probability,
            state={"ids": ids, "credit": credit},
        )
