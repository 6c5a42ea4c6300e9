"""Test helper: every algorithm for masked models as a loop over lists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import assume

from tests.support.reference import SETTINGS, Rule, decided
from vllm_dllm.decoding import Algorithm

MASK, L = 99, 12
WHOLE = ("steps", "sub_block_length")  # settings
MARGIN = 1e-5  # of rules whose numbers are not exact


def fresh_state(rule: Algorithm, rows: int, length: int) -> dict[str, torch.Tensor]:
    """The state of an algorithm before the first step of some canvases."""
    return {
        name: torch.full(
            (rows, *([length] if spec.per_position else []), *spec.extra), spec.initial
        ).to(spec.dtype)
        for name, spec in rule.state.items()
    }


@dataclass
class Row:
    """One canvas as lists: what a reference reads and writes."""

    tokens: list[int]
    masked: list[bool]
    fixed: list[bool]
    x: list[int]
    p: list[float]
    h: list[float]
    step: int
    settings: dict[str, float]
    state: dict[str, list]
    asked: list[list[float]]

    @property
    def open(self) -> list[int]:
        return [i for i in range(L) if self.masked[i]]

    def surest(self, among: list[int]) -> list[int]:
        return [max(among, key=lambda i: (self.p[i], -i))] if among else []

    def reveal(self, chosen: list[int]) -> None:
        for i in chosen:
            self.tokens[i], self.masked[i] = self.x[i], False


def as_in_engines(name: str) -> Callable[[Row], None]:
    """A rule that engines are compared with, too."""

    def decide(row: Row) -> None:
        given = {key: row.settings[key] for key in SETTINGS[name] if key in row.settings}
        settings = {key: int(value) if key in WHOLE else value for key, value in given.items()}
        if row.open:
            row.reveal(decided(Rule(name, **settings), row.step, L, row.open, row.p, row.h)[0])

    return decide


LOW_CONFIDENCE = as_in_engines("LowConfidence")


def hierarchical(row: Row) -> None:
    chosen = {i for i in row.open if row.p[i] > row.settings["threshold"]}
    chosen.update(row.surest(row.open))
    run: list[int] = []
    for i in range(L + 1):
        if i < L and row.masked[i]:
            run.append(i)
            continue
        chosen.update(j for j in row.surest(run) if row.p[j] > row.settings["low"])
        run = []
    row.reveal(sorted(chosen))


def entropy_bound(row: Row) -> None:
    shared, chosen = 0.0, []
    for i in sorted(row.open, key=lambda i: (row.h[i], i)):
        if shared <= row.settings["entropy_bound"]:
            chosen.append(i)
        shared += row.h[i]
    row.reveal(chosen)


def frechet_profile(row: Row) -> None:
    chosen, missing = row.surest(row.open), 0.0
    for n, i in enumerate(sorted(row.open, key=lambda i: (-row.p[i], i))):
        missing += 1 - row.p[i]
        if max(0, 1 - missing) >= row.settings["threshold"]:
            chosen = sorted(row.open, key=lambda i: (-row.p[i], i))[: n + 1]
    row.reveal(chosen)


def joint_threshold(row: Row) -> None:
    complete = not row.open
    spent = row.state["post_edit_steps"] + complete
    if complete and spent > row.settings["max_post_edit_steps"]:
        return
    edits = [
        i
        for i in range(L)
        if not row.masked[i] and not row.fixed[i] and row.p[i] > row.settings["edit_threshold"]
    ]
    LOW_CONFIDENCE(row)
    row.reveal(edits)


def credit(row: Row) -> None:
    sure = [0.0] * L
    for i in range(L):
        credits = {
            token: [value * row.settings["beta"], row.asked[i][k]]
            for k, (token, value) in enumerate(
                zip(row.state["ids"][i], row.state["credit"][i], strict=True)
            )
            if token >= 0
        }
        own = credits.pop(row.x[i], [0.0, 0.0])[0]
        if len(credits) == len(row.state["ids"][i]):
            credits.pop(min(credits, key=lambda t: credits[t][0]))
        logp = math.log(row.p[i])
        credits[row.x[i]] = [own + row.p[i] ** row.settings["gamma"], logp]
        lifted = {t: lp + row.settings["alpha"] * math.log1p(c) for t, (c, lp) in credits.items()}
        total = 1 + sum(math.exp(v) - math.exp(credits[t][1]) for t, v in lifted.items())
        best = sorted(lifted, key=lambda t: -lifted[t])
        if len(best) > 1 and row.masked[i]:
            assume(lifted[best[0]] - lifted[best[1]] > MARGIN)
        row.x[i], sure[i] = best[0], math.exp(lifted[best[0]]) / total
    row.p = sure
    values = sorted([row.settings["threshold"], *(sure[i] for i in row.open)])
    assume(all(b - a > MARGIN for a, b in itertools.pairwise(values)))
    LOW_CONFIDENCE(row)


REFERENCES: dict[str, Callable[[Row], None]] = {
    **{name: as_in_engines(name) for name in SETTINGS},
    "FixedSteps": as_in_engines("LowConfidenceEven"),
    "LinearSpec": as_in_engines("ConfidenceThreshold"),  # drafts by it with another threshold
    "FrechetProfile": frechet_profile,
    "Hierarchical": hierarchical,
    "EntropyBound": entropy_bound,
    "JointThreshold": joint_threshold,
    "Credit": credit,
}
