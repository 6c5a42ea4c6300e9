"""Which keys each token of a step must see: from the requests and their phases alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dllm.engine.slots import Phase, SlotState
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, QuerySpan, WindowRule, interval


@dataclass(frozen=True)
class ExpectedKeys:
    """The queries of a step in the order of the batch, without padding.

    Attributes:
        spans: the positions of each request's query.
        rules: the mask of each request.
    """

    spans: Sequence[QuerySpan]
    rules: Sequence[MaskRule]

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(span.end - span.start for span in self.spans)

    def edges(self, window: int) -> torch.Tensor:
        """Int64 ``[3, tokens]``: each token's position, its first key, and the end of its keys.

        Args:
            window: W of the layer's sliding window, 0 for a layer without one.
        """
        columns = []
        for span, rule in zip(self.spans, self.rules, strict=True):
            position = torch.arange(span.start, span.end)
            columns.append(torch.stack([position, *interval(position, span, rule, window)]))
        return torch.cat(columns, 1)


def expected_keys(batch: Any, slots: SlotState) -> ExpectedKeys:
    """The keys of a step that vLLM is about to run.

    Aligned canvases belong to a block-causal mask (LLaDA2). Otherwise canvases that are denoised
    are bidirectional, and everything else is causal (DiffusionGemma).

    Args:
        batch: vLLM's ``InputBatch``.
        slots: the slots, before the step.
    """
    spans, rules = [], []
    for row, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
        end = int(batch.seq_lens[row])
        spans.append(QuerySpan(end - int(batch.num_scheduled_tokens[row]), end))
        if slots.kind.aligned:
            rules.append(MaskRule(slots.length, WindowRule.NONE))
        else:
            denoised = int(slots.phase[slot]) == Phase.DENOISE
            rules.append(MaskRule(WHOLE if denoised else 1, WindowRule.SYMMETRIC))
    return ExpectedKeys(spans, rules)
