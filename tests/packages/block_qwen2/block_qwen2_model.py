from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.families.block_causal.model import MaskedCanvasModel


class BlockQwen2ForCausalLM(MaskedCanvasModel, Qwen2ForCausalLM):
    """Qwen2's weights and forward pass, as vLLM has them."""
