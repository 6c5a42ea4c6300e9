"""Attention of passes that verify a draft, on vLLM's CPU backend: see `engine.draft_passes`.

A mask in place i has to see its own key and those of the draft before it, but not the draft's key
in place i, and both belong into one slot of the cache. The mask of no batch says that, but an order
does: the last place first. Each place's mask overwrites the draft's key there, which only later
places see, and is read at the end of a sequence of i + 1 positions. So a layer computes the first
halves in one causal call, and the second halves in L calls, whatever the number of canvases. It
needs nothing of a backend but causal attention and single queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine.slots import Phase, SlotState
from vllm_dllm.families.block_causal.attention import BlockCausal

# Tokens of a batch, int64 ``[m]``, and the metadata of the sequences that they end.
Rows = tuple[torch.Tensor, CPUAttentionMetadata]
PADDING = -1  # the slot of keys and values that are not kept


@dataclass
class DraftMetadata(CPUAttentionMetadata):
    """A step in which some windows hold a draft.

    Attributes:
        drafts: what a layer computes for them, in this order: it stores the keys and values of the
            tokens, then reads. The slots are those of the metadata.
    """

    drafts: tuple[Rows, ...] = ()


class DraftRowsImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, which computes the windows that hold a draft a second time."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM's class; shapes ``[tokens, heads, head size]``."""
        arguments = (layer, query, key, value, kv_cache, attn_metadata, output)
        super().forward(*arguments, output_scale, output_block_scale)
        if not isinstance(attn_metadata, DraftMetadata):
            return output
        for token, metadata in attn_metadata.drafts:
            own = key[token], value[token]
            self.do_kv_cache_update(layer, *own, kv_cache, metadata.slot_mapping)
            read = torch.empty_like(output[token])
            super().forward(layer, query[token], *own, kv_cache, metadata, read)
            output[token] = read
        return output


def read_drafts(model: nn.Module) -> None:
    """Let a model's attention read drafts.

    Raises:
        RuntimeError: its layers have another backend; start-up chooses vLLM's for the CPU.
    """
    layers = [layer.impl for layer in model.modules() if hasattr(layer, "impl")]
    for impl in layers:
        if not isinstance(impl, CPUAttentionBackendImpl):
            raise RuntimeError(f"drafts cannot be verified with {type(impl).__name__}")
        # vLLM's layer has already created its implementation; only `forward` differs, not the
        # attributes.
        impl.__class__ = DraftRowsImpl


class BlockCausalWithDrafts(BlockCausal):
    """An `AttentionRule`: that of `BlockCausal`, but for windows that hold a draft.

    It also corrects the batch for these: their positions are those of the canvas twice, and their
    keys and values go to no slot unless `DraftRowsImpl` puts them there.
    """

    def __init__(self, slots: SlotState) -> None:
        super().__init__(slots.length, slots.device)
        self.slots = slots

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`."""
        slots, given, length = self.slots, batch.input, self.block_length
        slot = given.idx_mapping[: given.num_reqs].long()
        row = (slots.phase[slot] == int(Phase.VERIFY)).nonzero()[:, 0]
        if not len(row):
            return super().metadata(batch)
        assert slots.window is not None
        slot, count = slot[row], len(row)
        first = given.query_start_loc[row].long()
        token = first[:, None] + torch.arange(2 * length)  # [m, 2 L]
        start = slots.start[slot]
        position = start[:, None] + slots.position  # [m, L]
        given.positions[token] = torch.cat([position, position], 1).to(given.positions.dtype)
        mappings = batch.common["slot_mappings"]  # [groups, tokens]
        of_canvas = first[:, None] + slots.position + slots.window.before_canvas(slot)[:, None]
        kept = mappings[:, of_canvas]  # [groups, m, L]
        mappings[:, token] = PADDING
        tables = tuple(table[row] for table in batch.block_tables)

        def sequences(tokens: torch.Tensor, slots_of: torch.Tensor, seen: int) -> dict[str, Any]:
            """The metadata of ``[m, n]`` tokens at the end of sequences, by layer."""
            each = tokens.shape[1]
            query_start = torch.arange(count + 1, dtype=torch.int32) * each
            return build_attn_metadata(
                num_reqs=count,
                query_start_loc_gpu=query_start,
                query_start_loc_cpu=query_start,
                max_query_len=each,
                seq_lens=(start + seen).int(),
                block_tables=tables,
                causal=True,
                **batch.common
                | {
                    "num_tokens": count * each,
                    "slot_mappings": slots_of.flatten(1).contiguous(),  # the kernel takes no stride
                    "positions": given.positions[tokens.flatten()],
                },
            )

        halves = token.view(count, 2, length)
        passes = [(halves[:, 0], sequences(halves[:, 0], kept, length))]
        for place in reversed(range(length)):
            one = halves[:, 1, place : place + 1]
            passes.append((one, sequences(one, kept[:, :, place : place + 1], place + 1)))
        # Layers of a KV cache group share one object.
        own: dict[int, DraftMetadata] = {}
        metadata = super().metadata(batch)
        for name, entry in metadata.items():
            if id(entry) not in own:
                drafts = tuple((tokens.flatten(), by_layer[name]) for tokens, by_layer in passes)
                own[id(entry)] = DraftMetadata(**vars(entry), drafts=drafts)
            metadata[name] = own[id(entry)]
        return metadata
