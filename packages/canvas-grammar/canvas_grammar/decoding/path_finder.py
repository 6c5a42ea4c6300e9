"""Find the paths of a decoding step: turn logits into tokens that lie on one path.

An engine makes a `PathFinder` for its device when it starts, and a plan for each set of canvases
that it decodes together, whatever their automata are. In a step it hands over logits, as they come
into being, and then lets the paths be found:

    step = PathStep(plan, window, free, path)
    finder.read(step, range(len(canvases)), logits)
    finder.follow(step)

Whichever positions a decoding algorithm then decides, it must decide on these tokens. If the text
of the likeliest tokens of all, up to the first one that ends a text, satisfies the constraint, then
these are the best path's. The probability of a drawn path is proportional to the exponential of the
sum of its tokens' logits, up to the token that ends the text. So it equals the probability of the
path's text if canvases were drawn without a constraint repeatedly until one has an allowed text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from canvas_grammar.automaton.tables import Tables, automaton_tables, class_tables
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens


@dataclass(frozen=True)
class PlannedCanvas:
    """A canvas and what it must follow, in tables on the finder's device."""

    index: int  # where it is in its batch
    automaton: Tables  # see `automaton_tables`
    classes: Tables  # see `class_tables`
    best: bool = True  # whether its best path is found
    draws: bool = False  # whether a path is drawn; if both, the drawn one is the second


@dataclass(frozen=True)
class PathStep:
    """A step of a batch of ``n`` canvases."""

    plan: Any  # from `PathFinder.plan`, for some of the canvases
    window: CanvasWindow  # of all canvases of the batch
    free: FreeTokens  # of all canvases, too
    path: ConstrainedPath  # where the paths of the planned canvases are written
    second: ConstrainedPath | None = None  # the same for drawn ones beside best ones


class PathFinder(Protocol):
    """Finds paths on one device; keeps the memory that this takes."""

    def plan(self, canvases: Sequence[PlannedCanvas]) -> Any:
        """Prepare for steps of these canvases, of the same batch; plans may be kept."""

    def read(
        self,
        step: PathStep,
        canvases: range,
        logits: torch.Tensor,
        exact: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        """Read the logits of some of the planned canvases, which then are no longer needed.

        All planned canvases must be read before `follow`, and no other step may begin in between.

        Args:
            step: the step.
            canvases: which of the plan's canvases these are.
            logits: float32, bfloat16 or float16. ``[n, L, ids]``, the logits of the whole batch, or
                ``[m, L, ids]``, those of these canvases alone if they are fewer than ``n``. -inf
                excludes a token. They need not be normalized.
            exact: the same logits before tokens were excluded, by which margins are computed.
            place: int64 ``[n, L]``, for a CPU alone: the row of each position in logits ``[rows,
                ids]``, or -1 if it has none. Only positions of windows that are not forced need a
                row; margins of others are 0.
        """

    def nbytes(self, plan: Any, length: int) -> int:
        """How much memory steps of a plan take until they are over, in canvases of this length."""

    def follow(self, step: PathStep) -> None:
        """Find the paths, and write them."""


def path_finder(device: torch.device) -> PathFinder:
    """Make the finder for a device: compiled loops on a CPU, Triton kernels elsewhere."""
    if device.type == "cpu":
        return CpuPathFinder()
    from canvas_grammar.decoding.path_kernels import TritonPathFinder

    return TritonPathFinder(device)


def warm_up(device: torch.device, length: int) -> None:
    """Compile everything that finds paths on a device by running steps of a tiny automaton.

    This takes seconds. Kernels are compiled again for a `length` that is 1 or no multiple of 16.
    """
    kinds = np.array([0, 1], dtype=np.int64)
    two_states = TokenAutomaton(
        class_of_token=kinds,
        distance=np.array([1, 0]),
        edge_source=np.array([0, 0, 1]),
        edge_target=np.array([0, 1, 1]),
        edge_label=np.array([0, 1, 1]),
        members=kinds,
        label_first=np.array([0, 1, 2]),
        classes=2,
    )
    own = [tables.on(device) for tables in (automaton_tables(two_states), class_tables(kinds, 2))]
    finder, one = path_finder(device), torch.ones(1, dtype=torch.int64, device=device)
    forced = torch.full((1, length), -1, device=device)
    window = CanvasWindow(0 * one, 0 * one, length * one, length * one, forced)
    token, share = torch.zeros_like(forced), torch.ones((1, length), device=device)
    for dtype in (torch.float32, torch.bfloat16):
        # Strides of a head: kernels are compiled for multiples of 16.
        logits = torch.zeros((1, length, 16), dtype=dtype, device=device)
        for best, draws in ((True, False), (False, True), (True, True)):
            warmth = torch.ones(1, device=device) if best else None
            free = FreeTokens(token, token, share, forced, warmth) if draws else FreeTokens(token)
            path = ConstrainedPath.empty(window)
            second = path.like() if best and draws else None
            plan = finder.plan([PlannedCanvas(0, own[0], own[1], best, draws)])
            step = PathStep(plan, window, free, path, second)
            finder.read(step, range(1), logits)
            finder.follow(step)


class CpuPathFinder:
    """See `PathFinder`. A path is found as soon as its logits are read."""

    def plan(self, canvases: Sequence[PlannedCanvas]) -> tuple[PlannedCanvas, ...]:
        """See `PathFinder`."""
        return tuple(canvases)

    def read(
        self,
        step: PathStep,
        canvases: range,
        logits: torch.Tensor,
        exact: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        """See `PathFinder`."""
        planned = [step.plan[number] for number in canvases]
        if place is None:
            count, length = logits.shape[:2]
            place = torch.arange(count * length).view(count, length)
            logits = logits.flatten(0, 1)
            exact = None if exact is None else exact.flatten(0, 1)
        whole = len(place) == len(step.window.state)
        places = [one.index if whole else n for n, one in enumerate(planned)]
        rows, own = _contiguous(logits), logits if exact is None else exact
        for draws, path, some in (
            (False, step.path, [n for n, one in enumerate(planned) if one.best]),
            (True, step.path, [n for n, one in enumerate(planned) if one.draws and not one.best]),
            (True, step.second, [n for n, one in enumerate(planned) if one.draws and one.best]),
        ):
            if path is None or not some:
                continue
            group = [planned[n] for n in some]
            at = place[[places[n] for n in some]]  # [group, L]
            self._find(step, group, rows, at, path, draws)
            index = torch.tensor([one.index for one in group])
            pair = torch.stack([path.token[index], step.free.likeliest[index]], -1)
            pair.clamp_(max=own.shape[1] - 1)
            picked = own[at.clamp_min(0)[..., None], pair].float()
            margin = picked[..., 0] - picked[..., 1]
            path.margin[index] = torch.where(at >= 0, margin, 0.0)

    def _find(
        self,
        step: PathStep,
        canvases: Sequence[PlannedCanvas],
        rows: torch.Tensor,
        places: torch.Tensor,
        path: ConstrainedPath,
        draws: bool,
    ) -> list[float]:
        """Write paths but for their margins, and return their weights; see `cpu_paths`.

        `places` are those of the canvases' positions in `rows`, int64 ``[canvases, L]``.
        """
        from canvas_grammar.decoding.cpu_paths import find_path

        window, free = step.window, step.free
        end, first = window.end.long(), window.first.long()
        left = window.budget.long() - (end - first)
        bounds = torch.stack([window.state, first, end, left], 1).numpy()
        forced, likeliest = _array(window.forced), _array(free.likeliest)
        chosen, share, keys = likeliest, _NO_SHARE, likeliest
        if draws:
            assert free.drawn is not None and free.share is not None and free.keys is not None
            chosen, share, keys = _array(free.drawn), _array(free.share), _array(free.keys)
        token, inside, after_end = path.token.numpy(), path.inside.numpy(), path.after_end.numpy()
        states, feasible, weights = path.states.numpy(), path.feasible.numpy(), []
        is_half = rows.dtype == torch.bfloat16
        values = _NO_VALUES if is_half else rows.numpy()
        bits = rows.view(torch.uint16).numpy() if is_half else _NO_BITS
        for canvas, place in zip(canvases, places.numpy(), strict=True):
            i, temperature = canvas.index, 1.0
            if draws and free.temperature is not None:
                temperature = float(free.temperature[i]) or 1.0
            weight = find_path(
                canvas.automaton.numbers.numpy(), canvas.automaton.columns,
                canvas.classes.numbers.numpy(), canvas.classes.columns, values, bits, place,
                draws, temperature, bounds[i], forced[i], likeliest[i], chosen[i],
                share[i] if draws else _NO_SHARE[0], keys[i], token[i], inside[i], after_end[i],
                states[i], feasible[i : i + 1],
            )  # fmt: skip
            weights.append(float(weight))
        return weights

    def nbytes(self, plan: Any, length: int) -> int:
        """See `PathFinder`."""
        return 0

    def follow(self, step: PathStep) -> None:
        """See `PathFinder`."""


_NO_SHARE: np.ndarray = np.zeros((1, 0), dtype=np.float32)
_NO_VALUES: np.ndarray = np.zeros((0, 0), dtype=np.float32)
_NO_BITS: np.ndarray = np.zeros((0, 0), dtype=np.uint16)


def _array(of: torch.Tensor) -> np.ndarray:
    """The same numbers, contiguous: functions are compiled for one layout."""
    return of.contiguous().numpy()


def _contiguous(rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, ids]`` as contiguous ``[n, ids or more]``, float32 or bfloat16; a copy if needed.

    A head may have more ids than the model, so that its rows are parts of wider ones.
    """
    if rows.dtype not in (torch.float32, torch.bfloat16):
        return rows.float().contiguous()
    count, width = len(rows), rows.stride(0)
    ends = rows.storage_offset() + count * width
    wider = rows.stride(1) == 1 and width > rows.shape[1]
    if wider and ends <= rows.untyped_storage().nbytes() // rows.element_size():
        return rows.as_strided((count, width), (width, 1))
    return rows.contiguous()
