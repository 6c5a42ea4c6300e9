"""The route of a loaded model: confirmed on its layers, with CUDA graphs that are right for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.routes import DEVICES, GEMMA, LLADA2
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.attention.routes import LayerShape, Options, RouteError
from vllm_dllm.attention.served_route import LayerBackend, _name, confirm_layers, limit_graphs
from vllm_dllm.families.block_causal.attention import BlockCausal

HOPPER = DEVICES["SM90"]
GLOBAL, WINDOWED = LayerShape(512), LayerShape(256, 1024)


def made(*names: str, version: int | None = None) -> list[LayerBackend]:
    return [
        LayerBackend(name, version, shape)
        for name, shape in zip(names, (GLOBAL, WINDOWED), strict=False)
    ]


def test_layers_that_vllm_made() -> None:
    assert confirm_layers([], HOPPER, GEMMA, Options()) is None
    triton = made("TRITON_ATTN", "TRITON_ATTN")
    assert confirm_layers(triton, HOPPER, GEMMA, Options()) == "causal tensor"
    assert confirm_layers(made("CUSTOM", "CUSTOM"), HOPPER, GEMMA, Options()) == "rules"
    with pytest.raises(RouteError, match=r"global layers, FLASH_ATTN 2: FlashAttention 2 has no"):
        confirm_layers(made("FLASH_ATTN", version=2), HOPPER, GEMMA, Options())


def test_our_backend_has_all_layers_or_none() -> None:
    """It takes rules, not a causal tensor, and all layers share one kind of metadata."""
    with pytest.raises(RouteError, match="others TRITON_ATTN"):
        confirm_layers(made("CUSTOM", "TRITON_ATTN"), HOPPER, GEMMA, Options())


def test_anothers_backend_under_the_free_name_is_not_ours() -> None:
    """vLLM has one name for backends of third parties; only ours takes rules."""

    class Foreign:
        get_name = staticmethod(lambda: "CUSTOM")

    named = made(_name(Foreign))
    with pytest.raises(RouteError, match=r"CUSTOM of tests\.attention\.test_served_route: .*tried"):
        confirm_layers(named, HOPPER, LLADA2, Options())


def graphs(
    mode: str, layer: LayerBackend, method: str, *, seats: int = 64, split: bool = True
) -> str:
    """The mode that is left of vLLM's."""
    from vllm.config.compilation import CUDAGraphMode

    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[mode],
            max_cudagraph_capture_size=128,
            splitting_ops_contain_attention=lambda: split,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seats, max_num_batched_tokens=8192),
    )
    limit_graphs(config, HOPPER, [layer], method, 32)
    return config.compilation_config.cudagraph_mode.name


@pytest.mark.parametrize(
    ("mode", "backend", "method", "split", "left"),
    [
        ("FULL", "TRITON_ATTN", "virtual sequences", True, "FULL_AND_PIECEWISE"),
        # vLLM makes FULL_AND_PIECEWISE into FULL where attention is not split off.
        ("FULL", "TRITON_ATTN", "virtual sequences", False, "FULL_DECODE_ONLY"),
        ("FULL", "TRITON_ATTN", "causal tensor", True, "FULL"),
        ("FULL", "CUSTOM", "rules", True, "FULL_AND_PIECEWISE"),
        ("FULL_DECODE_ONLY", "TRITON_ATTN", "virtual sequences", True, "FULL_DECODE_ONLY"),
        ("PIECEWISE", "TRITON_ATTN", "virtual sequences", True, "PIECEWISE"),
        ("NONE", "TRITON_ATTN", "virtual sequences", True, "NONE"),
    ],
)
def test_graphs_that_answer_wrongly_are_not_left(
    mode: str, backend: str, method: str, split: bool, left: str
) -> None:
    assert graphs(mode, LayerBackend(backend, None, GLOBAL), method, split=split) == left


def test_flash_attention_3_holds_so_many_sequences_in_full_graphs() -> None:
    """Its buffer has an entry for each request or token of the largest graph."""
    layer = LayerBackend("FLASH_ATTN", 3, GLOBAL)
    assert graphs("FULL_AND_PIECEWISE", layer, "virtual sequences", seats=64) == "PIECEWISE"
    assert graphs("FULL_DECODE_ONLY", layer, "virtual sequences", seats=64) == "NONE"
    assert graphs("FULL_AND_PIECEWISE", layer, "causal tensor") == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize(
    "lengths",
    [
        (32, 33),  # a prompt of more than a block
        (64, 64),  # fused commits: a block and the next canvas
    ],
)
def test_no_full_graph_replays_a_query_longer_than_a_block(lengths: tuple[int, ...]) -> None:
    """It would read the whole query with one mask, and answer wrongly without a word."""
    batch: Any = SimpleNamespace(
        num_scheduled_tokens=np.array(lengths), num_draft_tokens_per_req=np.array((32, 32))
    )
    rule = BlockCausal(32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=rf"query of {max(lengths)} tokens.*FULL_DECODE_ONLY"):
        rule.metadata(AttentionBatch(batch, True, (), {}))
