"""Sampled SDAR: a drawn token is as sure as it is likely, whatever it was drawn from."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engine import engine
from tests.support.reference_sdar import random_checkpoint

pytestmark = pytest.mark.engine

RULES = (
    *("LowConfidenceDynamic", "LowConfidenceStatic", "LowConfidence"),
    *("ConfidenceThreshold", "LowConfidenceEven"),
)


def asked(rule: str, **options: Any) -> SamplingParams:
    extra = {"diffusion_algorithm": rule}
    if rule == "LowConfidenceStatic":
        extra["diffusion_steps"] = 2
    return SamplingParams(max_tokens=24, ignore_eos=True, seed=7, extra_args=extra, **options)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}], ids=["whole", "filtered"])
def test_the_confidence_of_drawn_tokens(tmp_path: Path, filters: dict[str, Any]) -> None:
    """Also beside requests of LLaDA2's rule, whose draws are as sure as the likeliest token."""
    model = random_checkpoint(tmp_path, experts=False, block=4)
    found: dict[tuple[str, bool], list[torch.Tensor]] = defaultdict(list)
    requests = [
        asked(rule, temperature=temperature, **filters)
        for temperature in (0.0, 0.6, 1.0, 1.4)
        for rule in RULES
    ]
    with engine(model, 4, diffusion_config=None) as running:
        readout, slots = running.runner.sampler.readout, running.slots
        read = readout.read

        def compared(hidden: torch.Tensor, request: Any) -> Any:
            readings = read(hidden, request)
            token, sure = readings.statistics.token, readings.statistics.probability
            likely = readout.head(hidden).float().softmax(-1).view(*token.shape, -1)
            own = likely.gather(-1, token[..., None])[..., 0]
            for row, slot in enumerate(request.on_host.tolist()):
                rule = list(slots.algorithms.by_name)[slots.algorithms.which[slot]]
                drawn = bool(slots.samples[slot])
                found[rule, drawn].append(torch.stack([sure[row], own[row]]))
            return readings

        readout.read = compared
        prompts = [[(11 * i + n) % 290 for i in range(9)] for n in range(len(requests))]
        running.generate(prompts, requests)
    for (rule, drawn), pairs in found.items():
        sure, own = torch.cat(pairs, 1)
        if rule == "LowConfidence" and drawn:
            assert (sure > own + 0.05).any(), "nothing was drawn but the likeliest token"
        else:
            torch.testing.assert_close(sure, own, atol=1e-6, rtol=1e-5)
    assert len(found) == 2 * len(RULES)
