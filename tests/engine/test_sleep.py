"""Which tensors become buffers of the model, so that vLLM restores them when it wakes up."""

from __future__ import annotations

import torch
from torch import nn

from vllm_dllm.engine.sleep import keep_asleep
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.two_block_window import TwoBlockWindow
from vllm_dllm.families.block_causal.attention import BlockCausal, block_causal_rules
from vllm_dllm.families.llada2_2.block_routing import BlockRows


class Layer(nn.Module):
    """A layer with a parameter, a buffer, and what is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.rows = BlockRows(4, 2)
        self.half = self.weight[:1]


class Owner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.slots = SlotState(3, CanvasKind(4, 100, 99, aligned=True), torch.device("cpu"))
        self.window = TwoBlockWindow(self.slots, 64)
        self.rules = [block_causal_rules(self.slots), BlockCausal(4, self.slots.device, 3, 2)]


def test_what_is_written_once_is_kept() -> None:
    owner = Owner(nn.Sequential(Layer()))
    keep_asleep(owner.model, owner)
    kept = {tensor.data_ptr() for tensor in owner.model.buffers()}
    rules, blocks = owner.rules
    assert isinstance(blocks, BlockCausal) and blocks.windows is not None
    once = [
        *(owner.slots.position, owner.slots.integers, owner.slots.failure, rules.rule.block),
        *(owner.window.masks, blocks.windows.hidden, owner.model[0].rows.place),
    ]
    assert kept.issuperset(tensor.data_ptr() for tensor in once)
    assert owner.model[0].weight.data_ptr() not in kept
    assert list(owner.model.state_dict()) == ["0.weight", "0.mean"]
    count = len(kept)
    keep_asleep(owner.model, owner)
    assert len(list(owner.model.buffers())) == count
