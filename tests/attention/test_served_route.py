"""A served model's route in vLLM's configuration, and the CUDA graphs that are right for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from tests.support.routes import GEMMA, LLADA2
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.attention.routes import Options, RouteError, choose_route
from vllm_dllm.attention.served_route import apply_route, device_here, name_of
from vllm_dllm.families.block_causal.attention import BlockCausal


def test_all_layers_have_the_same_backend() -> None:
    """Our backend takes rules and no causal tensor, and layers share one kind of metadata."""
    attention = SimpleNamespace(backend_per_kind={"sliding_window": "CUSTOM"})
    config: Any = SimpleNamespace(attention_config=attention)
    with pytest.raises(RouteError, match=r"backend_per_kind: .* remove it"):
        apply_route(config, GEMMA)


def test_anothers_backend_under_the_free_name_is_not_ours() -> None:
    """vLLM has one name for backends of third parties; only ours takes rules."""

    class Foreign:
        get_name = staticmethod(lambda: "CUSTOM")

    with pytest.raises(RouteError, match=r"CUSTOM of tests\.attention\.test_served_route: .*tried"):
        choose_route(device_here(), LLADA2, Options(name_of(Foreign)))


@pytest.mark.parametrize("piecewise", [True, False])
def test_a_full_graph_replays_virtual_sequences_of_canvases_only(piecewise: bool) -> None:
    """vLLM lowers the mode by what the rule states."""
    assert BlockCausal.graph_support == AttentionCGSupport.UNIFORM_BATCH
    config = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
    config.splitting_ops = list(config._attention_ops) if piecewise else []
    left = config.resolve_cudagraph_mode_and_sizes(
        BlockCausal.graph_support, "BlockCausal", 32, True
    )
    expected = "FULL_AND_PIECEWISE" if piecewise else "FULL_DECODE_ONLY"
    assert left == CUDAGraphMode[expected]


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
