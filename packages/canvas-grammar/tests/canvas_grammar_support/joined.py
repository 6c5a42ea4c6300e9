"""Test helper: decoding steps of canvases with automata of their own, from logits or weights.

Each step can be computed in every form that there is: by the plain reference, by the compiled loops
for CPUs, and by the Triton kernels, in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from canvas_grammar.automaton.pushdown import NO_CLASS
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.automaton_tables import automaton_tables
from canvas_grammar.decoding.best_path import (
    LOG2_E,
    CanvasWindow,
    ConstrainedPath,
    FreeTokens,
)
from canvas_grammar.decoding.path_finder import CpuPathFinder, PathFinder, PathStep, PlannedCanvas
from canvas_grammar.decoding.tables import Column, Tables
from canvas_grammar.decoding.token_classes import class_tables

from canvas_grammar_support import reference
from canvas_grammar_support.noise import gumbel

FORMS = ("reference", "cpu", "triton")


@dataclass(frozen=True)
class Joined:
    """What canvases follow: an automaton for each, and tables."""

    found: tuple[TokenAutomaton, ...]
    automata: tuple[Tables, ...]
    classes: tuple[Tables, ...]


@dataclass(frozen=True)
class ClassPaths:
    """A path of token classes through each canvas.

    Attributes:
        classes: int64 ``[n, L]``; C outside the window.
        states, feasible, after_end: see `ConstrainedPath`.
        weight: float64 ``[n]``, of the best path, or the logarithm of the sum over all paths.
    """

    classes: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor
    after_end: torch.Tensor
    weight: torch.Tensor


class Reference:
    """A `PathFinder` that calls the reference."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def plan(self, canvases: Sequence[PlannedCanvas]) -> Any:
        return canvases

    def read(
        self,
        step: PathStep,
        canvases: range,
        logits: torch.Tensor,
        exact: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        assert place is None
        exact = logits if exact is None else exact
        for number in canvases:
            canvas: PlannedCanvas = step.plan[number]
            at = canvas.index if len(logits) == len(step.window.state) else number - canvases.start
            own = slice(canvas.index, canvas.index + 1)
            parts = {k: v if v is None else v[own] for k, v in vars(step.free).items()}
            for draws in [False] * canvas.best + [True] * canvas.draws:
                path = step.second if draws and canvas.best and step.second else step.path
                weight = reference.find_path(
                    canvas.automaton, canvas.classes, logits[at], exact[at],
                    step.window.part(own), FreeTokens(**parts), path.part(own), draws,
                )  # fmt: skip
                self.weights.append(weight)

    def follow(self, step: PathStep) -> None:
        pass


class OnCpu(CpuPathFinder):
    """The form for CPUs, which keeps the weights of paths."""

    def _find(self, *args: Any) -> list[float]:
        self.weights = super()._find(*args)
        return self.weights


def finder_of(form: str) -> PathFinder:
    """A finder on this machine's CPU; the kernels work in memory full of garbage."""
    if form == "reference":
        return Reference()
    return OnCpu() if form == "cpu" else interpreted_finder()


@cache
def _kernels() -> Any:
    pytest.importorskip("triton")
    from canvas_grammar.decoding import path_kernels

    from tests.support.ops.interpreter import interpreted

    return path_kernels, interpreted("canvas_grammar.decoding.paths_triton")


def interpreted_finder() -> Any:
    """A `TritonPathFinder` whose kernels are interpreted where there is no GPU."""
    path_kernels, kernels = _kernels()

    class Interpreted(path_kernels.TritonPathFinder):  # type: ignore[name-defined,misc]
        def read(self, step: PathStep, canvases: range, *logits: Any, **place: Any) -> None:
            if canvases.start == 0:
                garbage(self.scratch.parts.values())
            with mock.patch.object(path_kernels, "paths_triton", kernels):
                super().read(step, canvases, *logits, **place)

        def follow(self, step: PathStep) -> None:
            with mock.patch.object(path_kernels, "paths_triton", kernels):
                super().follow(step)
            draws = step.plan.rows[:, Column.DRAWS]
            found = self.scratch.parts["weight"][: len(draws)]
            self.weights = torch.where(draws > 0, found / LOG2_E, found).tolist()

    class Poisoned(path_kernels.Scratch):  # type: ignore[name-defined,misc]
        def take(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            is_new = name not in self.parts
            part = super().take(name, dtype, *shape)
            if is_new:
                garbage([part])
            return part

    made = Interpreted(torch.device("cpu"))
    made.scratch = Poisoned(made.device)
    return made


def garbage(tensors: Any) -> None:
    """Fill tensors with what nobody may read."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype != torch.bool:
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 123)


def joined(*automata: TokenAutomaton) -> Joined:
    """What canvases follow, an automaton for each."""
    tables = {id(found): automaton_tables(found) for found in automata}
    classes = {id(f): class_tables(f.class_of_token, f.classes) for f in automata}
    return Joined(
        automata,
        tuple(tables[id(found)] for found in automata),
        tuple(classes[id(found)] for found in automata),
    )


def find(
    form: str,
    constraint: Joined,
    logits: torch.Tensor,
    window: CanvasWindow,
    free: FreeTokens,
    draws: bool,
) -> tuple[ConstrainedPath, torch.Tensor]:
    """Paths through all canvases, and their weights, float64 ``[n]``."""
    finder, path = finder_of(form), ConstrainedPath.empty(window)
    garbage(vars(path).values())
    canvases = [
        PlannedCanvas(n, *tables, best=not draws, draws=draws)
        for n, tables in enumerate(zip(constraint.automata, constraint.classes, strict=True))
    ]
    step = PathStep(finder.plan(canvases), window, free, path)
    finder.read(step, range(len(canvases)), logits)
    finder.follow(step)
    return path, torch.as_tensor(finder.weights, dtype=torch.float64)  # type: ignore[attr-defined]


def with_no_class(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights ``[n, L, C + 1]`` of canvases with different numbers of classes, from ``[L, C]``."""
    most = max(one.shape[1] for one in weights) + 1
    return torch.stack(
        [torch.nn.functional.pad(one, (0, most - one.shape[1]), value=9e9) for one in weights]
    )


def best(
    constraint: Joined,
    weights: torch.Tensor,
    window: CanvasWindow,
    whole: torch.Tensor | None = None,
    form: str = "cpu",
) -> ClassPaths:
    """The best path for weights ``[n, L, C + 1]`` of classes, each of which has one token.

    Without `whole`, tokens that end a text weigh after the end what they weigh elsewhere.
    """
    return _of_weights(constraint, weights, window, whole, form)


def drawn(
    constraint: Joined,
    weights: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor,
    whole: torch.Tensor | None = None,
    form: str = "cpu",
) -> ClassPaths:
    """A drawn path for weights ``[n, L, C + 1]``; otherwise as `best`."""
    return _of_weights(constraint, weights, window, whole, form, keys)


def _of_weights(
    constraint: Joined,
    weights: torch.Tensor,
    window: CanvasWindow,
    whole: torch.Tensor | None,
    form: str,
    keys: torch.Tensor | None = None,
) -> ClassPaths:
    count, length, most = weights.shape
    whole = torch.full((count, length), -torch.inf) if whole is None else whole
    # After the tokens of classes comes one of no class, which weighs as much as all.
    logits = torch.cat([weights[..., : most - 1], whole[..., None]], -1)
    none = torch.full((count, length), most - 1)
    tables = {
        found.classes: class_tables(
            np.where(np.arange(most) < found.classes, np.arange(most), NO_CLASS), found.classes
        )
        for found in constraint.found
    }
    single = replace(constraint, classes=tuple(tables[f.classes] for f in constraint.found))
    forced = window.forced.clone()
    for row, found in zip(forced, constraint.found, strict=True):
        held = row >= 0
        kinds = torch.from_numpy(found.class_of_token.astype(np.int64))[row.clamp_min(0)]
        row[held] = torch.where(kinds == NO_CLASS, most - 1, kinds)[held]
    free = FreeTokens(none, none, torch.ones(count, length), keys)
    path, weight = find(
        form, single, logits, replace(window, forced=forced), free, keys is not None
    )
    classes = torch.where(path.inside, path.token, most - 1)
    return ClassPaths(classes, path.states, path.feasible, path.after_end, weight)


def best_tokens(
    constraint: Joined, logits: torch.Tensor, window: CanvasWindow, form: str = "cpu"
) -> ConstrainedPath:
    """The best path for logits ``[n, L, ids]``."""
    free = FreeTokens(logits.argmax(-1))
    return find(form, constraint, logits, window, free, False)[0]


def drawn_tokens(
    constraint: Joined,
    logits: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor,
    form: str = "cpu",
) -> ConstrainedPath:
    """A drawn path for logits ``[n, L, ids]``."""
    return find(form, constraint, logits, window, drawn_freely(logits, keys), True)[0]


def drawn_freely(logits: torch.Tensor, keys: torch.Tensor) -> FreeTokens:
    """What canvases would hold without a constraint, with noise for every id."""
    rows = logits.float()
    noise = gumbel(keys.flatten(), torch.arange(rows.shape[-1])).view(*keys.shape, -1)
    share = (rows.amax(-1) - rows.logsumexp(-1)).exp()
    return FreeTokens(rows.argmax(-1), (rows + noise).argmax(-1), share, keys)
