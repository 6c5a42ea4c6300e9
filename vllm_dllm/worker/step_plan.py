"""A batch before and after a decoding update, and the rules by which canvases leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.decoding import Canvas
from vllm_dllm.worker.algorithm_state import AlgorithmBatch
from vllm_dllm.worker.readout.contract import ReadRequest
from vllm_dllm.worker.slots import Standing


@dataclass(frozen=True)
class CommitPolicy:
    """When a canvas leaves.

    Attributes:
        sync: finished canvases wait for all others of the batch.
        early: see `emitted_length`.
        skip_last_commit: a request's last canvas leaves without a commit.
        in_place: a denoise pass over a final canvas is as good as a commit, because the model
            reads both with the same mask and the same input.
        fused: a canvas leaves without its commit, which shares a pass with the first step of the
            next canvas.
    """

    sync: bool
    early: bool
    skip_last_commit: bool
    in_place: bool
    fused: bool = False


@dataclass(frozen=True)
class StepPlan:
    """The batch before the update.

    Attributes:
        before: ``[n, L]``.
        standing: where its requests stand.
        batches: the canvases by algorithm.
        request: what they need of the model's output.
    """

    before: Canvas
    standing: Standing
    batches: Sequence[AlgorithmBatch]
    request: ReadRequest


@dataclass(frozen=True)
class StepOutcome:
    """The batch after the update; bool ``[n]`` unless said otherwise.

    Attributes:
        canvas: ``[n, L]``.
        state: the tensors that each algorithm keeps.
        ready: int64 ``[n]``, the prefix that may leave, 0 while the canvas goes on.
        commits: this pass was the canvas' commit, so what was read leaves.
        skips_denoise: this pass did not denoise the canvas: it commits, or it waits for others.
        ready_to_leave: a prefix may leave and need not wait for others.
        leaves: a prefix leaves now, and with it the canvas.
        kv_pending: the canvas leaves, and its keys and values are not yet those of its tokens.
        goes_on: the canvas is denoised further.
        out: int64 ``[n]``, the prefix that has been put out after this step.
        path: of constrained canvases, or None.
        next_canvas: int64 ``[n, L]``, what the canvas behind this one begins with; None for masks.
    """

    canvas: Canvas
    state: list[Mapping[str, torch.Tensor]]
    ready: torch.Tensor
    commits: torch.Tensor
    skips_denoise: torch.Tensor
    ready_to_leave: torch.Tensor
    leaves: torch.Tensor
    kv_pending: torch.Tensor
    goes_on: torch.Tensor
    out: torch.Tensor
    path: ConstrainedPath | None
    next_canvas: torch.Tensor | None
