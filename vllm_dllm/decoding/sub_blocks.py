"""The rule of Fast-dLLM v2 and openPangu-R, which decides a block part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StepContext, Update, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class SubBlocksConfig(AlgorithmConfig):
    """Settings of `SubBlocks`; the defaults are those of ``generate``."""

    threshold: float = setting(
        1.0, "decide what is surer than this; 1 or more decides one position a step"
    )
    sub_block_length: int = setting(
        8, "positions that are decided before later ones", least=1, whole=True
    )


class SubBlocks(Algorithm):
    """Threshold decoding inside the first part of the block that has masked positions.

    With K the length of a sub-block, M the masked positions, x the argmax and p its probability::

        N = {i in M : floor(i / K) = floor(min(M) / K)}
        accept = {i in N : p_i > threshold} + {argmax over N of p_i}

    ``generate`` takes the probabilities of drawn tokens after temperature and top-p. The published
    code can also read a sub-block alone, against keys and values of the others that are out of
    date, which gives other answers.

    Source: ``generate`` of Fast-dLLM v2 (arXiv 2509.26328), ``small_block_size`` 8; the preset
    ``SubBlocks-Parallel`` is ``batch_sample``. ``origin`` and ``confidence_threshold`` of
    openPangu-R, with ``num_small_blocks`` = L / K.
    """

    name: str = "SubBlocks"
    config: type[AlgorithmConfig] = SubBlocksConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType({"Parallel": {"threshold": 0.95}})
    reads_decided: bool = False
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        probability, length = context.statistics.probability, canvas.tokens.shape[1]
        size = context.parameters["sub_block_length"].long()[:, None]
        part = torch.arange(length, device=size.device) // size  # [slots, L]
        first = canvas.masked.int().argmax(1, keepdim=True)
        now = canvas.masked & (part == part.gather(1, first))
        sureness = torch.where(now, probability, -1.0)
        accept = sureness > context.parameters["threshold"][:, None]
        best = sureness.argmax(1, keepdim=True)
        return reveal(canvas, context, accept.scatter(1, best, True))
