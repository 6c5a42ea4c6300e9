"""Two collectives that vLLM's CPU platform lacks and that data-parallel experts need.

The ranks of a data-parallel mixture of experts gather all tokens before the experts and take back
their own after them. Each rank may have a different number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Gather every rank's ``[sizes[rank], ...]`` to ``[sum(sizes), ...]``, in the ranks' order."""
    assert dim == 0, "rows only"
    if isinstance(input_, list):
        return [_all_rows(self, part, sizes) for part in input_]
    return _all_rows(self, input_, sizes)


def _all_rows(group: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [len(rows)] * group.world_size
    longest = max(sizes)
    # The collective takes equal shapes only, so rows are padded, and the padding is dropped.
    padding = (0, 0) * (rows.dim() - 1) + (0, longest - len(rows))
    parts = [rows.new_empty(longest, *rows.shape[1:]) for _ in sizes]
    dist.all_gather(parts, F.pad(rows, padding), group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows ``[sizes[rank], ...]`` of the sum of ``[sum(sizes), ...]`` over ranks."""
    assert dim in (0, -input_.dim()), "rows only"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    whole = input_.contiguous()
    dist.all_reduce(whole, group=self.device_group)
    return whole.split(sizes)[self.rank_in_group].clone()


def add_collectives() -> None:
    """Give vLLM's CPU communicator whichever of the two collectives it lacks."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for function in (all_gatherv, reduce_scatterv):
        name = function.__name__
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, function)
