"""Requests as a public trace has them on average: when they come, how long they are.

This is a statistic of the trace and not the trace itself. The Azure LLM inference trace of 2023
(github.com/Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv` and `_code.csv`, CC-BY;
Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024) has
an hour of two services. The figures below are means, and standard deviations over means, of the
gaps between its rows and of its two columns of tokens. Gaps are drawn from the Gamma distribution
with the same two figures, lengths from the log-normal one, all independently of each other.

The trace says nothing about what prompts have in common. `Prefixes` is an assumption.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A mean, and the standard deviation as a multiple of it (the coefficient of variation)."""

    mean: float
    variation: float


@dataclass(frozen=True)
class Trace:
    """Statistics of a trace.

    Attributes:
        gap: seconds between two requests.
        prompt, output: tokens.
    """

    gap: Spread
    prompt: Spread
    output: Spread


TRACES = {
    # 19,366 requests
    "conversation": Trace(Spread(1 / 5.53, 1.094), Spread(1154.7, 0.960), Spread(211.1, 0.771)),
    # 8,819 requests, which come in bursts
    "code": Trace(Spread(1 / 2.566, 13.15), Spread(2047.8, 0.964), Spread(27.9, 2.147)),
}


@dataclass(frozen=True)
class Prefixes:
    """What prompts begin with; an assumption.

    Attributes:
        count: different beginnings. The n-th is asked for in proportion to 1 / n (Zipf's law).
        share: of the mean prompt, which a beginning takes.
    """

    count: int = 500
    share: float = 0.5


@dataclass(frozen=True)
class Request:
    """A request of a workload.

    Attributes:
        number: its place among the arrivals.
        arrival: seconds.
        prefix: which beginning it has.
        shared, own: tokens of the prompt: of the beginning, and behind it.
        tokens: of the answer.
        passes: denoise steps that the answer takes, commits included.
    """

    number: int
    arrival: float
    prefix: int
    shared: int
    own: int
    tokens: int
    passes: int


def gamma_gaps(gap: Spread, count: int, generator: random.Random) -> list[float]:
    """Gaps from a Gamma distribution, in seconds; a variation of 1 is a Poisson process.

    They are scaled so that their mean is exact: with a variation of 13 that of some thousand gaps
    would be off by a third.
    """
    shape = 1 / gap.variation**2
    drawn = [generator.gammavariate(shape, 1 / shape) for _ in range(count)]
    scale = gap.mean * count / sum(drawn)
    return [scale * one for one in drawn]


def log_normal(spread: Spread, generator: random.Random) -> int:
    """A length of at least 1, with this mean and variation before it is rounded."""
    square = math.log1p(spread.variation**2)
    return max(1, round(generator.lognormvariate(math.log(spread.mean) - square / 2, square**0.5)))


@dataclass(frozen=True)
class Workload:
    """Requests that can be drawn.

    Attributes:
        trace: whose statistics they have.
        prefixes: what their prompts begin with.
        rate: requests a second, in place of the trace's own; its variation is kept.
        per_pass: tokens that a pass yields on average.
    """

    trace: Trace
    prefixes: Prefixes
    rate: float
    per_pass: float

    def draw(self, count: int, seed: int) -> list[Request]:
        """So many requests, the same ones for the same seed."""
        generator = random.Random(seed)
        gap = Spread(1 / self.rate, self.trace.gap.variation)
        shared = round(self.prefixes.share * self.trace.prompt.mean)
        own = Spread(self.trace.prompt.mean - shared, self.trace.prompt.variation)
        weights = [1 / (n + 1) for n in range(self.prefixes.count)]
        chosen = generator.choices(range(self.prefixes.count), weights, k=count)
        now, requests = 0.0, []
        for number, wait in enumerate(gamma_gaps(gap, count, generator)):
            now += wait
            tokens = log_normal(self.trace.output, generator)
            passes = max(1, round(tokens / self.per_pass))
            further = log_normal(own, generator)
            requests.append(Request(number, now, chosen[number], shared, further, tokens, passes))
        return requests
