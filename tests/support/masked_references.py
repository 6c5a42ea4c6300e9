"""Test helper: every algorithm for masked models as a loop over lists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import assume

MASK, L = 99, 12
MARGIN = 1e-5  # of rules whose numbers are not exact


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


def low_confidence(row: Row) -> None:
    row.reveal(
        [i for i in row.open if row.p[i] > row.settings["threshold"]] or row.surest(row.open)
    )


def confidence_threshold(row: Row) -> None:
    sure = [i for i in row.open if row.p[i] >= row.settings["threshold"]]
    row.reveal(sure + row.surest(row.open))


def even(row: Row) -> int:
    left = max(1, int(row.settings["steps"]) - row.step)
    return math.ceil(len(row.open) / left)


def low_confidence_even(row: Row) -> None:
    row.reveal(sorted(row.open, key=lambda i: (-row.p[i], i))[: even(row)])


def leftmost(row: Row) -> None:
    row.reveal(row.open[: even(row)])


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


def quota(row: Row) -> int:
    steps = int(row.settings["steps"])
    return L // steps + (row.step < L % steps)


def share(row: Row) -> list[int]:
    return sorted(row.open, key=lambda i: (-row.p[i], i))[: quota(row)] or row.surest(row.open)


def low_confidence_dynamic(row: Row) -> None:
    sure = [i for i in row.open if row.p[i] > row.settings["threshold"]]
    if len(sure) >= quota(row):
        row.reveal(sure or row.surest(row.open))
    else:
        row.reveal(share(row))


def low_confidence_static(row: Row) -> None:
    row.reveal(share(row))


def sequential(row: Row) -> None:
    row.reveal([i for i in row.open if i < row.open[0] + max(1, quota(row))])


def sub_blocks(row: Row) -> None:
    size = int(row.settings["sub_block_length"])
    part = [i for i in row.open if i // size == row.open[0] // size]
    sure = [i for i in part if row.p[i] > row.settings["threshold"]]
    row.reveal(sure or row.surest(part))


def entropy_bounded(row: Row) -> None:
    total, chosen = 0.0, []
    for i in sorted(row.open, key=lambda i: (row.h[i], i)):
        total += row.h[i]
        if not chosen or total < row.settings["entropy_bound"]:
            chosen.append(i)
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
    low_confidence(row)
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
    low_confidence(row)


REFERENCES: dict[str, Callable[[Row], None]] = {
    "LowConfidence": low_confidence,
    "FixedSteps": low_confidence_even,
    "LowConfidenceEven": low_confidence_even,
    "Leftmost": leftmost,
    "ConfidenceThreshold": confidence_threshold,
    "LinearSpec": confidence_threshold,  # drafts by the same rule, with another threshold
    "FrechetProfile": frechet_profile,
    "Hierarchical": hierarchical,
    "EntropyBound": entropy_bound,
    "JointThreshold": joint_threshold,
    "Credit": credit,
    "LowConfidenceDynamic": low_confidence_dynamic,
    "LowConfidenceStatic": low_confidence_static,
    "Sequential": sequential,
    "EntropyBounded": entropy_bounded,
    "SubBlocks": sub_blocks,
}
