"""The data of a decoding update: the batch before it, the batch after it, and the commit policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.decoding import Canvas
from vllm_dllm.engine.algorithm_state import AlgorithmBatch
from vllm_dllm.engine.readout.contract import ReadRequest
from vllm_dllm.engine.slots import Standing

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import ConstrainedPath


@dataclass(frozen=True)
class CommitPolicy:
    """When a canvas leaves, that is, when its tokens are output and its slot starts the next one.

    Attributes:
        sync: a finished canvas waits until all canvases of the batch are finished.
        early: a canvas may leave before all its positions are decided, see `emitted_length`.
        skip_last_commit: the last canvas of a request leaves without a commit.
        in_place: a denoise pass over a final canvas is as good as a commit, because the model
            reads both with the same mask and the same input.
        fused: a canvas leaves before its commit, and the commit shares a forward pass with the
            first step of the next canvas.
        two_blocks: as `fused`, and the commit is repeated with every step of the next canvas, so
            that the scheduler need not know when it is due.
    """

    sync: bool
    early: bool
    skip_last_commit: bool
    in_place: bool
    fused: bool = False
    two_blocks: bool = False


@dataclass(frozen=True)
class CanvasRows:
    """The canvases of a batch, in batch order.

    Attributes:
        slot: int64 ``[n]``, their slots.
        slot_on_host: the same slots as a numpy array.
        width: int64 ``[n]``, number of positions that were scheduled; None if all canvases are L
            wide.
    """

    slot: torch.Tensor
    slot_on_host: np.ndarray
    width: torch.Tensor | None


@dataclass(frozen=True)
class StepPlan:
    """The batch before the update.

    Attributes:
        before: the canvases, ``[n, L]``.
        standing: how far their requests have come.
        batches: the canvases, grouped by algorithm.
        request: what must be read from the model's output.
        waits: canvases whose constraint has not been looked up yet, which stay as they are; bool
            ``[n]``, or None where there can be none.
    """

    before: Canvas
    standing: Standing
    batches: Sequence[AlgorithmBatch]
    request: ReadRequest
    waits: torch.Tensor | None = None


@dataclass(frozen=True)
class StepOutcome:
    """The batch after the update. Tensors are bool ``[n]`` unless another type is given.

    Attributes:
        canvas: the updated canvases, ``[n, L]``.
        shown: int64 ``[n, L]``, the tokens of `canvas`; those of a commit are the tokens that the
            model has read, whatever the algorithm would change in them.
        state: for each algorithm of the batch, the tensors that it keeps for its next step.
        ready: int64 ``[n]``, length of the prefix that may leave; 0 while there is none.
        commits: this pass was the canvas' commit, so the tokens that the model has read leave.
        skips_denoise: this pass did not denoise the canvas, which is committed or waits for others.
        ready_to_leave: a prefix may leave, and it need not wait for other canvases.
        leaves: a prefix leaves in this step, and the slot starts its next canvas.
        kv_pending: the canvas leaves before the keys and values of its tokens are written.
        told: int64 ``[n]``, what the scheduler gets to know of the pass: minus the flags
            `tracing.records.Told`.
        goes_on: the canvas is denoised further.
        out: int64 ``[n]``, length of the prefix that has been output after this step.
        path: the paths of constrained canvases; None where no request has a constraint.
        next_canvas: int64 ``[n, L]``, random tokens that the next canvas starts from. None where
            canvases start from masks, or where the readout has computed none.
    """

    canvas: Canvas
    shown: torch.Tensor
    state: list[Mapping[str, torch.Tensor]]
    ready: torch.Tensor
    commits: torch.Tensor
    skips_denoise: torch.Tensor
    ready_to_leave: torch.Tensor
    leaves: torch.Tensor
    kv_pending: torch.Tensor
    told: torch.Tensor
    goes_on: torch.Tensor
    out: torch.Tensor
    path: ConstrainedPath | None
    next_canvas: torch.Tensor | None
