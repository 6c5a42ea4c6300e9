"""Launch the kernels of `paths_triton`, and keep the memory in which they work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvas_grammar.automaton.tables import COLUMNS, Column, Tables, to_device
from canvas_grammar.decoding import paths_triton
from canvas_grammar.decoding.best_path import ConstrainedPath
from canvas_grammar.decoding.path_finder import PathStep, PlannedCanvas

# How much of its work a program takes at a time. For an H100 (132 multiprocessors): a block of
# chunks is 4 KiB of bfloat16 logits, and each thread has 4 edges at a time.
CHUNKS, KINDS, GROUPS, TERMS, MEMBERS = 32, 32, 32, 16, 256
WALK_GROUPS, WALK_TERMS, EDGES, WALK_WARPS = 512, 8, 128, 16


@dataclass(frozen=True)
class KernelPlan:
    """Everything that the kernels read for a set of canvases, on the device except for sizes."""

    rows: Tensor  # int64 ``[paths, COLUMNS]``, the best paths before the drawn ones
    reads: Tensor  # int64 ``[canvases, 3]``, see `paths_triton.read_kernel`
    automata: Tensor  # int32, the tables
    classes: Tensor
    # The largest numbers of any canvas, rounded up to multiples of 16, so that kernels are compiled
    # once for all of them.
    states: int
    labels: int
    bundles: int
    kinds: int
    chunks: int


class Scratch:
    """Memory that kernels write before they read it. It grows with the largest step so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, Any] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor with any content, the same memory for the same name."""
        size = int(np.prod(shape))
        part = self.parts.get(name)
        if part is None or part.numel() < size:
            part = self.parts[name] = None  # the old memory is free before the new one is taken
            part = self.parts[name] = torch.empty(size, dtype=dtype, device=self.device)
        return part[:size].view(shape)


class TritonPathFinder:
    """See `PathFinder`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = Scratch(device)

    def plan(self, canvases: Sequence[PlannedCanvas]) -> KernelPlan:
        """See `PathFinder`. Copies to the device go on while the host continues."""
        automata, classes = _Joined(), _Joined()
        rows: list[np.ndarray] = []
        reads: np.ndarray = np.full((len(canvases), 3), -1, dtype=np.int64)
        for draws in (False, True):
            for number, canvas in enumerate(canvases):
                reads[number, 0] = canvas.index
                if canvas.draws if draws else canvas.best:
                    reads[number, 1 + draws] = len(rows)
                    row = automata.place(canvas.automaton) + classes.place(canvas.classes)
                    row[Column.CANVAS], row[Column.DRAWS] = canvas.index, draws
                    row[Column.SECOND] = draws and canvas.best
                    rows.append(row)

        def most(column: Column, more: int = 0) -> int:
            return -(-(max(int(row[column]) for row in rows) + more) // 16) * 16

        numbers = np.concatenate([np.stack(rows).ravel(), reads.ravel()])
        on_device = to_device(torch.from_numpy(numbers), self.device)
        return KernelPlan(
            on_device[: len(rows) * COLUMNS].view(-1, COLUMNS),
            on_device[len(rows) * COLUMNS :].view(-1, 3),
            automata.numbers(),
            classes.numbers(),
            states=most(Column.STATES),
            labels=most(Column.LABELS),
            bundles=most(Column.BUNDLES),
            kinds=most(Column.CLASSES, 1),
            chunks=most(Column.CHUNKS, 1),
        )

    def read(
        self,
        step: PathStep,
        canvases: range,
        logits: Tensor,
        exact: Tensor | None = None,
        place: Tensor | None = None,
    ) -> None:
        """See `PathFinder`."""
        assert place is None
        plan, free, of = step.plan, step.free, self._per_position(step)
        if logits.stride(2) != 1:
            logits = logits.contiguous()
        exact = logits if exact is None else exact
        assert exact.stride() == logits.stride()
        by_canvas = len(logits) == len(step.window.state)
        grid = len(canvases), of["length"], -(-plan.chunks // CHUNKS)
        paths_triton.read_kernel[grid](
            logits, exact, logits.stride(0), logits.stride(1), plan.reads, canvases.start,
            int(by_canvas), plan.rows, plan.classes, *self._window(step), of["forced"],
            of["likeliest"], of["drawn"], free.temperature, of["keys"], of["length"], plan.chunks,
            *self._chunks(plan, of["length"]), BLOCK=CHUNKS, num_warps=4,
        )  # fmt: skip

    def nbytes(self, plan: KernelPlan, length: int) -> int:
        """See `PathFinder`."""
        numbers = plan.kinds + plan.labels + plan.bundles + plan.states
        position = 9 * plan.chunks + 8 * numbers + 12
        return len(plan.rows) * (length * position + 8 * plan.states + 8)

    def follow(self, step: PathStep) -> None:
        """See `PathFinder`."""
        plan, of, take = step.plan, self._per_position(step), self.scratch.take
        paths, length, window = len(plan.rows), of["length"], self._window(step)
        chunks = self._chunks(plan, length)
        by_chunk, top = chunks[0], chunks[-1]
        by_class = take("class", torch.float64, paths, length, plan.kinds)
        by_label = take("label", torch.float64, paths, length, plan.labels)
        label = take("label of path", torch.int32, paths, length)
        paths_triton.weigh_kernel[paths, length](
            plan.rows, plan.automata, plan.classes, *window, of["forced"],
            top if step.free.share is None else step.free.share.contiguous(),
            step.free.temperature, length, plan.chunks, by_chunk, top, plan.kinds, by_class,
            plan.bundles, take("bundle", torch.float64, paths, length, plan.bundles),
            plan.labels, by_label,
            GROUPS=GROUPS, TERMS=TERMS, KINDS=KINDS, num_warps=4,
        )  # fmt: skip
        first, second = _memory(step.path), _memory(step.second)
        paths_triton.walk_kernel[(paths,)](
            plan.rows, plan.automata, step.window.state.contiguous(), *window, of["keys"], length,
            plan.labels, by_label, plan.states,
            take("message", torch.float64, paths, length + 1, plan.states), label,
            take("weight", torch.float64, paths), *first[4:], *second[4:],
            GROUPS=WALK_GROUPS, TERMS=WALK_TERMS, EDGES=EDGES, num_warps=WALK_WARPS,
        )  # fmt: skip
        paths_triton.choose_kernel[paths, length](
            plan.rows, plan.automata, plan.classes, *window, of["forced"], of["likeliest"],
            of["drawn"], of["keys"], length, plan.chunks, *chunks, plan.kinds, by_class, label,
            *first, *second, BLOCK=MEMBERS, num_warps=4,
        )  # fmt: skip

    def _chunks(self, plan: KernelPlan, length: int) -> tuple[Tensor, ...]:
        """The results of the first kernel, in the order of its arguments."""
        take, paths = self.scratch.take, len(plan.rows)
        return (
            take("chunk", torch.float32, paths, length, plan.chunks),
            take("place", torch.uint8, paths, length, plan.chunks),
            take("exact", torch.float32, paths, length, plan.chunks),
            take("chosen", torch.float32, paths, length),
            take("top", torch.float32, paths, length),
        )

    @staticmethod
    def _window(step: PathStep) -> tuple[Tensor, ...]:
        window = step.window
        return tuple(of.contiguous() for of in (window.first, window.budget, window.width))

    @staticmethod
    def _per_position(step: PathStep) -> dict[str, Any]:
        """The kernels' inputs at each position; any tensor will do for one that no path reads."""
        free = step.free
        likeliest = free.likeliest.contiguous()
        return {
            "length": likeliest.shape[1],
            "forced": step.window.forced.contiguous(),
            "likeliest": likeliest,
            "drawn": likeliest if free.drawn is None else free.drawn.contiguous(),
            "keys": likeliest if free.keys is None else free.keys.contiguous(),
        }


class _Joined:
    """Tables of several canvases, each of them once."""

    def __init__(self) -> None:
        self.parts: dict[Tables, int] = {}
        self.size = 0

    def place(self, tables: Tables) -> np.ndarray:
        """The columns of some tables, with their places among all."""
        if tables not in self.parts:
            self.parts[tables] = self.size
            self.size += len(tables.numbers)
        return tables.columns + tables.is_place * self.parts[tables]

    def numbers(self) -> Tensor:
        parts = [tables.numbers for tables in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _memory(path: ConstrainedPath | None) -> list[Tensor | None]:
    """The tensors of a path in their order, which the kernels write."""
    names = [f.name for f in fields(ConstrainedPath)]
    if path is None:
        return [None] * len(names)
    found = [getattr(path, name) for name in names]
    assert all(tensor.is_contiguous() for tensor in found)
    return found
