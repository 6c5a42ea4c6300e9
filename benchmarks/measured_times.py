"""Measured times of an engine's steps, and what a step between the measured ones takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any


@dataclass(frozen=True)
class Times:
    """Measured times of steps, in seconds.

    Attributes:
        denoise: with so many requests.
        first: a step that only prefills, without its tokens.
        token, begun: what a further prompt token costs, and a further request that begins.
        passes: of an answer behind its prefill.
    """

    denoise: dict[int, float]
    first: float
    token: float
    begun: float
    passes: int

    def step_seconds(self, requests: int, prompt: int, begun: int) -> float:
        """Of a step; between measured sizes on a straight line."""
        least = between(self.denoise, requests) if requests else self.first
        return least + self.token * prompt + self.begun * begun

    def figures(self) -> dict[str, Any]:
        """As they are written, in milliseconds."""
        return {
            "denoise_ms": {str(n): 1e3 * seconds for n, seconds in self.denoise.items()},
            "first_prefill_ms": 1e3 * self.first,
            "prompt_token_ms": 1e3 * self.token,
            "begun_ms": 1e3 * self.begun,
            "passes": self.passes,
        }


def between(points: dict[int, float], at: int) -> float:
    """The value at a place between known ones, on the straight line through its neighbours."""
    below = max((n for n in points if n <= at), default=min(points))
    above = min((n for n in points if n >= at), default=max(points))
    if below == above:
        return points[below]
    share = (at - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The height at zero and the slope of the line with the least squares."""
    across, up = (mean(one[axis] for one in points) for axis in (0, 1))
    slope = sum((x - across) * (y - up) for x, y in points)
    slope /= sum((x - across) ** 2 for x, _ in points)
    return up - slope * across, slope


def middle(one: Times, other: Times) -> Times:
    """The mean of two calibrations."""
    return Times(
        {n: (one.denoise[n] + other.denoise[n]) / 2 for n in one.denoise},
        (one.first + other.first) / 2,
        (one.token + other.token) / 2,
        (one.begun + other.begun) / 2,
        one.passes,
    )
