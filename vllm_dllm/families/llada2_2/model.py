"""LLaDA2.2 on LLaDA2's model: the same weights, other experts."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import VllmConfig

from vllm_dllm.families.llada2.model import LLaDA2Moe, LLaDA2MoeModelLM
from vllm_dllm.families.llada2_2.block_routing import BlockRouter, BlockRows
from vllm_dllm.families.model_state import FamilyModelState


class BlockRoutedState(FamilyModelState):
    """Also numbers the blocks of each step."""

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """See `DiffusionModelState`."""
        positions = input_batch.positions[: input_batch.num_tokens]
        self.model.rows.find(positions, input_batch.num_tokens_after_padding)
        return super().prepare_inputs(input_batch, req_states)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """See `DiffusionModelState`; a capture must not read the numbers of a larger step."""
        self.model.rows.block.copy_(self.model.rows.place)
        return super().prepare_dummy_inputs(num_reqs, num_tokens)


class LLaDA22MoeModelLM(LLaDA2MoeModelLM):
    """LLaDA2.2-flash; raises ValueError if the experts' kernel would choose them by itself."""

    released_as: ClassVar[str] = "LLaDA2.2"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        model = vllm_config.model_config
        config = model.hf_config
        self.rows = BlockRows(
            vllm_config.scheduler_config.max_num_batched_tokens, model.dllm.length
        )
        for module in self.modules():
            if not isinstance(module, LLaDA2Moe):
                continue
            experts: Any = module.experts
            if experts.is_monolithic:
                raise ValueError(
                    "this kernel chooses experts by itself, and not as LLaDA2.2 does; set "
                    "--moe-backend triton"
                )
            experts.router = BlockRouter(
                experts,
                module.gate.expert_bias,
                self.rows,
                config.expert_capacity,
                config.routed_scaling_factor,
            )

    @staticmethod
    def get_model_state_cls() -> type[FamilyModelState]:
        """See `MaskedCanvasModel`."""
        return BlockRoutedState
