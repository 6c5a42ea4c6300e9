"""The input and the result of a model family's attention rule.

A rule says which keys a batch's queries see, in the terms of vLLM's attention backends. Each family
has one: see `families.block_causal.attention` and `families.anchored.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata


@dataclass(frozen=True)
class AttentionBatch:
    """The batch that an attention rule is given."""

    input: Any  # vLLM's ``InputBatch``
    # Whether a full CUDA graph will replay, in which case tensors must be persistent and padded.
    full: bool
    block_tables: tuple[torch.Tensor, ...]  # one [rows, pages] tensor for each KV cache group
    common: dict[str, Any]  # the arguments of `build_attn_metadata` that do not depend on the rule

    @property
    def rows(self) -> int:
        """The number of rows in the metadata: requests, plus padding under a full CUDA graph."""
        return self.input.num_reqs_after_padding if self.full else self.input.num_reqs

    @property
    def max_seq_len(self) -> int:
        """An upper bound on the tokens of a sequence, known on the host."""
        return int(self.input.seq_lens_cpu_upper_bound.numpy()[: self.rows].max())

    def one_query_per_request(self, causal: bool | torch.Tensor) -> dict[str, Any]:
        """Return attention metadata for every layer, with the requests as they are.

        `causal` is a flag for all requests, or int32 ``[rows]`` with a flag for each.
        """
        batch, rows = self.input, self.rows
        return build_attn_metadata(
            num_reqs=rows,
            query_start_loc_gpu=batch.query_start_loc[: rows + 1],
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: rows + 1]),
            max_query_len=batch.max_query_len or int(batch.num_scheduled_tokens.max()),
            seq_lens=batch.seq_lens,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            block_tables=self.block_tables,
            causal=causal,
            **self.common,
        )


class AttentionRule(Protocol):
    """Which keys a model's queries see."""

    # The batches for which a full CUDA graph may replay the rule's metadata.
    graph_support: AttentionCGSupport

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """Return the attention metadata of a batch, by layer name."""
