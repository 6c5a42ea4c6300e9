"""What masked models have in common, without an engine: the head, and what a checkpoint states."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.families.block_causal.attention import split_into_blocks
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.families.block_causal.window_segments import WindowSegments, cut
from vllm_dllm.families.config_fields import canvas_length
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.server import LENGTHS
from vllm_dllm.startup.default_limits import set_defaults


class Backbone:
    """Stands for vLLM's class."""

    def __init__(self, *, vllm_config: Any, prefix: str) -> None:
        method, bias = UnquantizedEmbeddingMethod(), vllm_config.bias
        self.lm_head: Any = SimpleNamespace(quant_method=method, bias=bias)
        scale = vllm_config.scale
        self.logits_processor = SimpleNamespace(scale=scale, soft_cap=None, org_vocab_size=4)


class Model(MaskedCanvasModel, Backbone):
    pass


def model(scale: float = 1.0, bias: torch.Tensor | None = None) -> Model:
    return Model(
        vllm_config=SimpleNamespace(scale=scale, bias=bias, quant_config=None, lora_config=None)
    )


def config(folder: Path, diffusion: Any = None, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(fields))
    model = SimpleNamespace(model=str(folder), revision=None, hf_overrides={})
    return SimpleNamespace(model_config=model, diffusion_config=diffusion)


@pytest.mark.parametrize("more", [{"scale": 2.0}, {"bias": torch.zeros(4)}], ids=["scale", "bias"])
def test_a_head_that_is_more_than_a_matrix_is_not_cut_into_tiles(more: dict[str, Any]) -> None:
    assert model().has_plain_head
    assert not model(**more).has_plain_head
    with pytest.raises(ValueError, match=r"head of Model does more .* dllm\.kernels=torch"):
        model(**more).tiled_head()


def test_the_head_of_a_later_stage() -> None:
    later = model()
    later.lm_head = PPMissingLayer()
    assert not later.has_head
    assert not later.has_plain_head


@pytest.mark.parametrize("name", LENGTHS)
def test_the_checkpoint_states_the_block_length(name: str, tmp_path: Path) -> None:
    assert canvas_length(config(tmp_path, **{name: 8})) == 8
    assert canvas_length(config(tmp_path, SimpleNamespace(canvas_length=16), **{name: 8})) == 16
    for length in (0, -4, 2.5, "8", True, 1 << 40):
        with pytest.raises(SettingsError, match=rf"config\.json: {name} must be"):
            canvas_length(config(tmp_path, **{name: length}))


def test_two_lengths_contradict(tmp_path: Path) -> None:
    stated = config(tmp_path, block_length=8, canvas_length=16)
    with pytest.raises(SettingsError, match="block_length=8 contradicts canvas_length=16"):
        canvas_length(stated)


def test_a_missing_length_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.json of .* has no 'canvas_length'"):
        canvas_length(config(tmp_path))
    assert canvas_length(config(tmp_path), 4) == 4
    # Earlier, default limits leave it to that.
    args = SimpleNamespace(diffusion_config=None, max_num_seqs=7, max_num_batched_tokens=9)
    nothing: Any = SimpleNamespace(hf_config=SimpleNamespace())
    set_defaults(args, nothing, (False, False), self_conditioned=False)
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (7, 9)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 2))
def test_the_segments_of_full_graphs(length: int, rows: int, blocks: int, padding: int) -> None:
    """They are those of a batch that is cut on the host, and none of a padding row."""
    width = blocks * length
    row, wanted, hidden = split_into_blocks(np.full(rows, width), length)
    windows = WindowSegments(length, rows, torch.device("cpu"), blocks)
    start = torch.tensor([*range(0, (rows + 1) * width, width), *[rows * width] * padding])
    found = cut(start.int(), length, blocks).tolist()
    assert found == wanted.tolist() + [rows * width] * (padding * blocks)
    assert windows.hidden.repeat(rows).tolist() == hidden.tolist()
    assert row.tolist() == torch.arange(rows).repeat_interleave(blocks).tolist()


def test_segments_follow_a_block_table_that_becomes_narrower() -> None:
    """As it does when vLLM fits the context into memory, after it has tried graphs."""
    windows = WindowSegments(4, 2, torch.device("cpu"), 2)
    start, seen = np.array([0, 8]), torch.tensor([24], dtype=torch.int32)
    given = SimpleNamespace(
        num_reqs=1,
        query_start_loc_np=start,
        query_start_loc=torch.from_numpy(start),
        seq_lens=seen,
        seq_lens_cpu_upper_bound=seen,
    )
    common = {
        "attn_groups": [],
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[]),
        "slot_mappings": torch.zeros(1, 8),
        "num_tokens": 8,
        "max_seq_len": 24,
    }
    for width in (6, 3):
        table = torch.arange(width)[None]
        assert windows.metadata(AttentionBatch(given, False, (table,), common)) == {}
        assert windows.block_tables[0][:2].tolist() == table.expand(2, -1).tolist()


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([1, 8, 16, 32]))
def test_equals_the_loop(rows: list[int], block: int) -> None:
    """Of each block: its row, first query token, query tokens, and the keys that it lacks."""
    wanted, start = [], 0
    for row, tokens in enumerate(rows):
        for begin in range(0, tokens, block):
            end = min(begin + block, tokens)
            wanted.append((row, start + begin, end - begin, tokens - end))
        start += tokens
    row, query_start, hidden_keys = split_into_blocks(np.array(rows, dtype=np.int32), block)
    columns = row, query_start[:-1], np.diff(query_start), hidden_keys
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted
