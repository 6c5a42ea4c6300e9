"""LLaDA2.x: mixture-of-experts models with masked canvases and a block-causal mask."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig
from vllm.config import VllmConfig

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, hf_overrides
from vllm_dllm.ranges import SettingsError, shown
from vllm_dllm.settings.server import DEFAULT_BLOCK_LENGTH

# The architecture that checkpoints state, and the one under which LLaDA2.2 is served.
ROUTED, BLOCK_ROUTED = "LLaDA2MoeModelLM", "LLaDA22MoeModelLM"


# `strict` needs annotations that are evaluated.
@strict
class LLaDA2MoeConfig(PretrainedConfig):
    """``model_type: llada2_moe``, with the defaults that real checkpoints leave out.

    Published files have neither the mask id, which comes from the tokenizer, nor the block length,
    and some lack ``use_qk_norm``, which the authors' code applies regardless.

    LLaDA2.2 has the architecture and the type of its predecessors but is another network. A
    checkpoint that states ``expert_capacity`` gets an architecture of its own, `BLOCK_ROUTED`.
    """

    model_type = "llada2_moe"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    use_qk_norm: bool = True
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_rmsnorm: bool = True
    rope_theta: float | int = 600000.0
    rotary_dim: int | None = None
    partial_rotary_factor: float | int | None = None
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int = 1
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 2.5
    score_function: Literal["sigmoid", "softmax"] | None = "sigmoid"
    router_dtype: Literal["fp32", "bf16"] | None = "fp32"
    moe_router_enable_expert_bias: bool = True
    embedding_dropout: float | int = 0.0
    norm_head: bool = False
    tie_word_embeddings: bool = False
    mask_token_id: int | None = None
    block_length: int | None = None
    block_size: int | None = None
    canvas_length: int | None = None
    expert_capacity: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.complete()
        super().__post_init__(**kwargs)

    def update(self, config_dict: dict[str, Any]) -> None:
        """Replace these fields, as ``--hf-overrides`` asks for."""
        super().update(config_dict)
        self.complete()

    def complete(self) -> None:
        """Fill in the fields that are null and follow from others, and tell LLaDA2.2 apart."""
        architectures = getattr(self, "architectures", None)
        if architectures in ([ROUTED], [BLOCK_ROUTED]):
            self.architectures = [BLOCK_ROUTED if self.expert_capacity else ROUTED]
        if self.num_key_value_heads is None:
            self.num_key_value_heads = min(4, self.num_attention_heads)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.partial_rotary_factor is None:
            self.partial_rotary_factor = 0.5
            if self.rotary_dim is not None:
                self.partial_rotary_factor = self.rotary_dim / self.head_dim
        if self.n_group is None and self.topk_group is None:
            # One group selects the same experts, and every platform's router supports it.
            self.n_group = self.topk_group = 1
        if self.moe_shared_expert_intermediate_size is None:
            self.moe_shared_expert_intermediate_size = self.moe_intermediate_size
        if architectures in (None, [ROUTED], [BLOCK_ROUTED]):  # others need not be diffusion models
            stated = self.canvas_length or self.block_length or self.block_size
            self.canvas_length = stated or DEFAULT_BLOCK_LENGTH


FIELDS = Fields(
    LLaDA2MoeConfig,
    # Training, caching and dropout, and a window that the authors' code states but never applies.
    frozenset(
        {"attention_dropout", "output_dropout", "initializer_range", "use_cache"}
        | {"max_window_layers", "sliding_window", "use_sliding_window", "output_router_logits"}
        | {"router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"}
        | {"mtp_loss_scaling_factor", "moe_router_bias_update_rate"}
        # Read by vLLM.
        | {"rope_scaling", "rope_parameters"}
    ),
    {
        "expert_capacity": ((None, 0), "experts chosen for whole blocks (LLaDA2.2)"),
        "delete_token_id": ((None,), "tokens that are deleted from a canvas (LLaDA2.2)"),
        "split_token_id": ((None,), "tokens that are inserted into a canvas (LLaDA2.2)"),
        "norm_softmax": ((None, False), "a normalised softmax"),
        "using_split_qkv_in_self_attention": (
            (None, False),
            "query, key and value in matrices of their own",
        ),
        "use_rmsnorm": ((True,), "layer norm"),
        "hidden_act": (("silu",), "another activation than SiLU"),
    },
)


class LLaDA2(BlockCausalFamily):
    """LLaDA2.0 and 2.1, mini and flash."""

    architecture: ClassVar[str] = "LLaDA2MoeModelLM"
    fields: ClassVar[Fields] = FIELDS
    several_blocks: ClassVar[bool] = True

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        model = vllm_config.model_config
        # Checkpoints state a window that their model never applies; vLLM would apply it.
        model.hf_config.sliding_window = vllm_config.cache_config.sliding_window = None
        model.hf_config.complete()  # once more, because `--hf-overrides` may have set null
        super().configure(vllm_config)
        for sentence in contradictions(model.hf_config):
            given = any(f"{name}=" in sentence for name in hf_overrides(model))
            raise SettingsError(f"{'--hf-overrides' if given else 'config.json'}: {sentence}")


def contradictions(c: Any) -> Iterator[str]:
    """The fields that contradict each other in ways that vLLM would not report, in words."""
    factor, groups, chosen = c.partial_rotary_factor, c.n_group, c.topk_group
    if c.num_key_value_heads < 1 or c.num_attention_heads % c.num_key_value_heads:
        yield (
            f"num_attention_heads={c.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={c.num_key_value_heads}"
        )
    rotary = int(c.head_dim * factor) if c.rotary_dim is None else c.rotary_dim
    product = f"head_dim={c.head_dim} * partial_rotary_factor={factor}"
    if abs(rotary - c.head_dim * factor) >= 1:
        yield f"rotary_dim={rotary} contradicts {product}; give one, or both alike"
    elif rotary % 2:
        yield f"rotary_dim={rotary} ({product}) must be even"
    ends = getattr(c, "eos_token_id", None)
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and 0 <= end < c.vocab_size for end in each):
        # The first request with `min_tokens` would index past the end of the logits.
        yield f"eos_token_id={shown(ends)} must be in [0, vocab_size={c.vocab_size})"
    if groups is None or chosen is None:
        yield f"n_group={groups} and topk_group={chosen}: give both or neither"
        return
    # A group is judged by its two best experts if there is a bias.
    least = 2 if c.moe_router_enable_expert_bias else 1
    if groups < 1 or c.num_experts % groups or c.num_experts < least * groups:
        yield (
            f"num_experts={c.num_experts} must be a multiple of n_group={groups}, and at least "
            f"{least} times that"
        )
    elif not 1 <= chosen <= groups:
        yield f"topk_group={chosen} must be at least 1 and at most n_group={groups}"
    elif c.num_experts_per_tok > (most := chosen * c.num_experts // groups):
        yield (
            f"num_experts_per_tok={c.num_experts_per_tok} must be at most {most}, which is "
            f"topk_group={chosen} groups of num_experts={c.num_experts} / n_group={groups}"
        )
