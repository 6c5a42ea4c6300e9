"""A batch before and after a decoding update, and the rules by which canvases leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.decoding import Canvas
from vllm_dllm.worker.algorithm_state import Group
from vllm_dllm.worker.readout_ways import Wanted
from vllm_dllm.worker.slots import Standing


@dataclass(frozen=True)
class Policy:
    """When a canvas leaves.

    Attributes:
        sync: finished canvases wait for all others of the batch.
        early: see `emitted_length`.
        skip_last_commit: a request's last canvas leaves without a commit.
        in_place: a denoise pass over a final canvas is as good as a commit: the model reads both
            with the same mask and the same input.
        fused: a canvas leaves without its commit, which shares a pass with the first step of the
            next canvas.
    """

    sync: bool
    early: bool
    skip_last_commit: bool
    in_place: bool
    fused: bool = False


@dataclass(frozen=True)
class Plan:
    """The batch before the update.

    Attributes:
        before: ``[n, L]``.
        standing: where its requests stand.
        groups: who decodes which canvases.
        wanted: what they need of the model's output.
    """

    before: Canvas
    standing: Standing
    groups: Sequence[Group]
    wanted: Wanted


@dataclass(frozen=True)
class Outcome:
    """The batch after the update; bool ``[n]`` unless said otherwise.

    Attributes:
        canvas: ``[n, L]``.
        state: of each group's algorithm.
        ready: int64 ``[n]``, the prefix that may leave, 0 while the canvas goes on.
        commits: this pass was the canvas' commit, so what was read leaves.
        rests: this pass did not denoise the canvas: it commits, or it waits for others.
        settled: a prefix may leave and need not wait for others.
        leaves: a prefix leaves now, and with it the canvas.
        unwritten: the canvas leaves, and its keys and values are not yet those of its tokens.
        out: int64 ``[n]``, the prefix that is out after this step.
        path: of constrained canvases, or None.
        fresh: int64 ``[n, L]``, what the canvas behind this one begins with; None for masks.
    """

    canvas: Canvas
    state: list[Mapping[str, torch.Tensor]]
    ready: torch.Tensor
    commits: torch.Tensor
    rests: torch.Tensor
    settled: torch.Tensor
    leaves: torch.Tensor
    unwritten: torch.Tensor
    out: torch.Tensor
    path: ConstrainedPath | None
    fresh: torch.Tensor | None

    @property
    def goes_on(self) -> torch.Tensor:
        """The canvas is denoised further."""
        return ~(self.leaves | self.settled)
