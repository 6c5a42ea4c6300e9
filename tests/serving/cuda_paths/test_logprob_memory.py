"""What logprobs hold at the published sizes, and that a step with logprobs waits for nothing.

The tensors are on torch's ``meta`` device: they have sizes but no values, so nothing takes memory,
and any read of a value raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.sampler import Alive, sampler_of, size, slots_of, step, tensors_in
from vllm_dllm.decoding.credit import Credit
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.decoding.joint_threshold import JointThreshold
from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import SampledStatistics

GIGABYTE = 1 << 30
REQUESTS = 64
# What vLLM's warm-up asks for, but filters: their code chooses by the device's kind.
WARM_UP = RowOptions(
    logit_bias={0: -1.0, 1: 0.5},
    banned=(0,),
    min_tokens=2,
    ends=(1,),
    presence=0.5,
    frequency=0.5,
    repetition=1.2,
    logprobs=5,
    prompt_length=4,
)
GEMMA = {"length": 256, "vocabulary": 262_144, "hidden": 2816}
LLADA2 = {"length": 32, "vocabulary": 157_184, "hidden": 2048}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gemma(vocabulary: int) -> tuple[DiffusionSampler, torch.Tensor]:
    """A sampler with 64 canvases of DiffusionGemma, and their hidden states."""
    length, hidden = GEMMA["length"], GEMMA["hidden"]
    kind = CanvasKind(length, vocabulary, None, aligned=False)
    slots = slots_of(kind, [EntropyBound()] * REQUESTS, 0.9, "meta")
    head = Head(
        lambda rows, first, end: meta(len(rows), end - first),
        vocabulary,
        embedding=meta(vocabulary, hidden, dtype=torch.bfloat16),
    )

    def without_rows(
        states: torch.Tensor, head: Head, temperature: Any, keys: torch.Tensor, budget: int
    ) -> tuple[SampledStatistics, torch.Tensor]:
        """The pass over tiles, which is not what is counted here."""
        token, number = meta(*keys.shape, dtype=torch.int64), meta(*keys.shape)
        return SampledStatistics(token, number, token, number, number), meta(*states.shape)

    def readout(parts: OptionalParts) -> NoiseReadout:
        made = NoiseReadout(head, slots, parts)
        made.statistics = without_rows
        return made

    return sampler_of(slots, readout, [WARM_UP] * REQUESTS), meta(
        REQUESTS * length, hidden, dtype=torch.bfloat16
    )


def llada2(vocabulary: int) -> tuple[DiffusionSampler, torch.Tensor]:
    """The same of LLaDA2, with several algorithms."""
    length, hidden = LLADA2["length"], LLADA2["hidden"]
    kind = CanvasKind(length, vocabulary, vocabulary - 1, aligned=True)
    algorithms = [LowConfidence(), JointThreshold(), Credit(), LowConfidence()] * (REQUESTS // 4)
    slots = slots_of(kind, algorithms, 0.0, "meta")

    def head(rows: torch.Tensor) -> torch.Tensor:
        return meta(len(rows), vocabulary, dtype=torch.bfloat16)

    sampler = sampler_of(
        slots, lambda parts: MaskedReadout(head, slots, parts), [WARM_UP] * REQUESTS
    )
    return sampler, meta(REQUESTS * length, hidden, dtype=torch.bfloat16)


class Watched:
    """The memory of a sampler's logprobs during one step.

    Attributes:
        held: bytes that they hold at most.
        read: bytes of whole rows that are alive while a part of the batch is read, at most.
        reported: bytes of whole rows that are alive when all is read.
    """

    def __init__(self, sampler: DiffusionSampler, vocabulary: int, alive: Alive) -> None:
        self.held, self.read = 0, 0
        self.reported: list[int] = []
        reports = sampler.parts.logprobs
        observe, capture = reports.observe, reports.capture

        def rows() -> int:
            return size(tensor for tensor in alive.now() if vocabulary in tensor.shape)

        def captured(*args: Any) -> None:
            capture(*args)
            self.read = max(self.read, rows())

        def watched(*args: Any) -> None:
            self.reported.append(rows())
            before = size(tensors_in(reports))
            observe(*args)
            self.held = max(before, size(tensors_in(reports)))

        reports.capture, reports.observe = captured, watched


@pytest.mark.parametrize(
    ("family", "sizes", "budget"), [(gemma, GEMMA, GIGABYTE // 2), (llada2, LLADA2, GIGABYTE // 4)]
)
def test_nothing_that_is_held_depends_on_the_vocabulary(
    family: Any, sizes: dict[str, int], budget: int
) -> None:
    """64 requests of DiffusionGemma with ``logprobs=5`` held 16 GiB of whole rows.

    Rows are read in parts: one canvas of DiffusionGemma, its logits and its distribution, or some
    blocks of LLaDA2, with copies of the logits before they were biased.
    """
    held = []
    for vocabulary in (sizes["vocabulary"], sizes["vocabulary"] // 2):
        sampler, hidden = family(vocabulary)
        with Alive() as alive:
            watched = Watched(sampler, vocabulary, alive)
            output = step(sampler, hidden, range(REQUESTS))
        assert watched.reported == [0], "whole rows are alive when logprobs are reported"
        assert 0 < watched.read <= budget
        sent = output.logprobs_tensors
        assert sent.logprobs.shape == (REQUESTS * sizes["length"], 6)
        assert sent.cu_num_generated_tokens == [n * sizes["length"] for n in range(REQUESTS)]
        held.append(watched.held)
    assert held[0] == held[1]
    print(f"{family.__name__}: {held[0] / 2**20:.2f} MiB for {REQUESTS} requests")
    assert 0 < held[0] < GIGABYTE // 128
