from vllm_dllm.families.block_causal.family import BlockCausalFamily


class BlockQwen2(BlockCausalFamily):
    """Qwen2 trained to fill masked blocks."""

    architecture = "BlockQwen2ForCausalLM"
    model_class = "block_qwen2_model:BlockQwen2ForCausalLM"
