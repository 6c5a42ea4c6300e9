"""What masked models have in common, without an engine: the head, and what a checkpoint states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_dllm.families.block_causal.engine_config import block_length, refuse_sliding_window
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.ranges import SettingsError
from vllm_dllm.startup.default_limits import set_defaults


class Backbone:
    """Stands for vLLM's class."""

    def __init__(self, *, vllm_config: Any, prefix: str) -> None:
        method, bias = UnquantizedEmbeddingMethod(), vllm_config.bias
        self.lm_head: Any = SimpleNamespace(quant_method=method, bias=bias)
        scale = vllm_config.scale
        self.logits_processor = SimpleNamespace(scale=scale, soft_cap=None, org_vocab_size=4)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class Model(MaskedCanvasModel, Backbone):
    pass


def model(scale: float = 1.0, bias: torch.Tensor | None = None) -> Model:
    return Model(vllm_config=SimpleNamespace(scale=scale, bias=bias, quant_config=None))


def config(diffusion: Any = None, **fields: Any) -> Any:
    model = SimpleNamespace(model="somewhere", hf_config=SimpleNamespace(**fields), hf_overrides={})
    return SimpleNamespace(model_config=model, diffusion_config=diffusion)


def test_the_head_is_the_backbones() -> None:
    """What a backbone does to its logits is done; vLLM itself gets hidden states."""
    hidden = torch.zeros(2, 3)
    assert model().compute_logits(hidden) is hidden
    assert model().head(hidden).equal(hidden + 1)


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


@pytest.mark.parametrize("fields", [{"canvas_length": 8}, {"block_length": 8}])
def test_the_checkpoint_states_the_block_length(fields: dict[str, int]) -> None:
    assert block_length(config(**fields)) == 8
    assert block_length(config(SimpleNamespace(canvas_length=16), **fields)) == 16


def test_two_lengths_contradict() -> None:
    with pytest.raises(SettingsError, match="block_length=8 contradicts canvas_length=16"):
        block_length(config(block_length=8, canvas_length=16))


def test_a_missing_length_is_named() -> None:
    with pytest.raises(SettingsError, match=r"config\.json of somewhere has no 'canvas_length'"):
        block_length(config())
    # Earlier, default limits leave it to that.
    args = SimpleNamespace(diffusion_config=None, max_num_seqs=7, max_num_batched_tokens=9)
    set_defaults(args, config().model_config, (False, False), self_conditioned=False)
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (7, 9)


def test_a_sliding_window_is_refused() -> None:
    def stated(window: int | None) -> Any:
        return SimpleNamespace(get_sliding_window=lambda: window)

    refuse_sliding_window(stated(None))
    with pytest.raises(SettingsError, match=r"sliding_window=16: .* --disable-sliding-window"):
        refuse_sliding_window(stated(16))
