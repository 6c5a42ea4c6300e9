"""Paths of canvases with automata of their own.

They are found by the compiled loops for CPUs, or by the Triton kernels, which are interpreted where
there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from canvas_grammar.automaton.tables import Column, Tables, automaton_tables, class_tables
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.best_path import LOG2_E, CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import CpuPathFinder, PathStep, PlannedCanvas

from vllm_dllm.ops.noise.keyed import gumbel

FORMS = ("cpu", "triton")


@dataclass(frozen=True)
class Joined:
    """What canvases follow: an automaton for each, and tables."""

    found: tuple[TokenAutomaton, ...]
    automata: tuple[Tables, ...]
    classes: tuple[Tables, ...]


class OnCpu(CpuPathFinder):
    """The form for CPUs, which keeps the weights of paths."""

    def _find(self, *args: Any) -> list[float]:
        self.weights = super()._find(*args)
        return self.weights


def finder_of(form: str) -> Any:
    """A finder on this machine's CPU; the kernels work in memory full of garbage."""
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
    cpu = torch.device("cpu")
    tables = {id(found): automaton_tables(found).on(cpu) for found in automata}
    classes = {id(f): class_tables(f.class_of_token, f.classes).on(cpu) for f in automata}
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
    return path, torch.as_tensor(finder.weights, dtype=torch.float64)


def token_paths(
    constraint: Joined,
    logits: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor | None = None,
    form: str = "cpu",
) -> ConstrainedPath:
    """The best path for logits ``[n, L, ids]``; with `keys` a drawn one."""
    free = FreeTokens(logits.argmax(-1)) if keys is None else drawn_freely(logits, keys)
    return find(form, constraint, logits, window, free, keys is not None)[0]


def drawn_freely(logits: torch.Tensor, keys: torch.Tensor) -> FreeTokens:
    """What canvases would hold without a constraint, with noise for every id."""
    rows = logits.float()
    noise = gumbel(keys.flatten(), torch.arange(rows.shape[-1])).view(*keys.shape, -1)
    share = (rows.amax(-1) - rows.logsumexp(-1)).exp()
    return FreeTokens(rows.argmax(-1), (rows + noise).argmax(-1), share, keys)
