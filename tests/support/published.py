"""Published checkpoints: configuration and every tensor of their indexes.

LLaDA2's are those of ../shared/oracle/README.md, written down here once more. The names of the
others come from transformers' own classes, with the sizes of published models: SDAR's from Qwen3,
Stable-DiffCoder's from Llama, Fast-dLLM v2's from Qwen2, and Nemotron's from Ministral 3.
DreamReasoner's and openPangu-R's configurations have not been seen; these are what is known.
"""

from __future__ import annotations

from typing import Any

import torch

LLADA2 = {
    "llada2-mini": (20, 2048, 5120, 512, 16),
    "llada2-flash": (32, 4096, 9216, 1024, 32),
    "llada2.2-flash": (32, 4096, 9216, 1024, 32),
}
# What LLaDA2.2's configuration has beside that of LLaDA2.1.
LLADA22 = {
    "rope_theta": 3000000, "max_position_embeddings": 131072, "use_qk_norm": True,
    "block_size": 32, "expert_capacity": 48, "delete_token_id": 156930, "split_token_id": 156931,
}  # fmt: skip
GEMMA_TEXT = {
    "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
    "moe_intermediate_size": 704, "num_hidden_layers": 30,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8,
    "sliding_window": 1024, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision", "max_position_embeddings": 262144,
}  # fmt: skip
GEMMA_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
}  # fmt: skip
# Hidden size, layers, heads, heads of keys and values, width of a dense MLP; then of experts.
SDAR: dict[str, tuple[int, ...]] = {
    "sdar-1.7b-chat": (2048, 28, 16, 8, 6144),
    "sdar-30b-a3b-chat": (2048, 48, 32, 4, 6144, 768, 128, 8),
}
# Hidden size, layers, width of an MLP, base of the rotary embedding.
NEMOTRON: dict[str, tuple[int, int, int, float]] = {
    "nemotron-labs-diffusion-3b": (3072, 26, 9216, 1e6),
    "nemotron-labs-diffusion-14b": (5120, 40, 16384, 1e9),
}
EXPERTS, KEY_VALUE_HEADS, HEAD_DIM, VOCABULARY = 256, 4, 128, 157184

# What several of the configurations state.
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def llada2_config(which: str) -> dict[str, Any]:
    layers, hidden, size, expert, heads = LLADA2[which]
    own = LLADA22 if which.startswith("llada2.2") else {}
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": size, "moe_intermediate_size": expert, "num_attention_heads": heads,
        "num_key_value_heads": KEY_VALUE_HEADS, "head_dim": HEAD_DIM, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "vocab_size": VOCABULARY, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 600000, "partial_rotary_factor": 0.5, "rotary_dim": 64,
        "hidden_act": "silu", "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "score_function": "sigmoid", "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True, "norm_head": False, "tie_word_embeddings": False,
        "use_bias": False, "use_qkv_bias": False, "use_rmsnorm": True,
        "max_position_embeddings": 32768, "dtype": "bfloat16",
        "mask_token_id": 156895,  # else asked of the tokenizer, of which there is none here
        **own,
    }  # fmt: skip


def llada2_tensors(which: str) -> Shapes:
    layers, hidden, size, expert, heads = LLADA2[which]
    shapes: Shapes = {
        "model.word_embeddings.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for n in range(layers):
        layer = f"model.layers.{n}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        rows = (heads + 2 * KEY_VALUE_HEADS) * HEAD_DIM
        shapes[f"{layer}.attention.query_key_value.weight"] = (rows, hidden)
        shapes[f"{layer}.attention.dense.weight"] = (hidden, heads * HEAD_DIM)
        shapes[f"{layer}.attention.query_layernorm.weight"] = (HEAD_DIM,)
        shapes[f"{layer}.attention.key_layernorm.weight"] = (HEAD_DIM,)
        blocks = {f"{layer}.mlp": size}
        if n:
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, hidden)
            shapes[f"{layer}.mlp.gate.expert_bias"] = (EXPERTS,)
            blocks = {f"{layer}.mlp.experts.{e}": expert for e in range(EXPERTS)}
            blocks[f"{layer}.mlp.shared_experts"] = expert
        for name, width in blocks.items():
            shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (width, hidden)
            shapes[f"{name}.down_proj.weight"] = (hidden, width)
    return shapes


def gemma_config() -> Any:
    from transformers import DiffusionGemmaConfig

    return DiffusionGemmaConfig(
        text_config=GEMMA_TEXT, vision_config=GEMMA_VISION, canvas_length=256
    )


def gemma_tensors() -> Shapes:
    """One copy of what encoder and decoder share, as `save_pretrained` writes it."""
    from transformers import DiffusionGemmaForBlockDiffusion

    with torch.device("meta"):
        state = DiffusionGemmaForBlockDiffusion(gemma_config()).state_dict()
    shapes: Shapes = {}
    for name, tensor in state.items():
        twin = name.replace("model.encoder.language_model.", "model.decoder.")
        shared = twin != name and twin in state and not name.endswith("layer_scalar")
        if not shared and name != "lm_head.weight":
            shapes[name] = tuple(tensor.shape)
    return shapes


def sdar_config(which: str) -> dict[str, Any]:
    """``config.json``, which states neither the block length nor the mask."""
    hidden, layers, heads, key_value_heads, size, *moe = SDAR[which]
    config: dict[str, Any] = COMMON | {
        "architectures": ["SDARMoeForCausalLM" if moe else "SDARForCausalLM"],
        "model_type": "sdar_moe" if moe else "sdar",
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "attention_bias": False, "attn_implementation": "flex_attention", "bos_token_id": 151643,
        "debug": False, "eos_token_id": 151643, "ep_size": 1, "fuse_cross_entropy": True,
        "head_dim": 128, "hidden_size": hidden, "intermediate_size": size,
        "max_position_embeddings": 32768, "max_window_layers": layers, "micro_forward": False,
        "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads, "rope_theta": 1000000, "skip_checkpoint": False,
        "sliding_window": None, "transformers_version": "4.52.4", "use_deepep": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    if moe:
        config |= dict(
            zip(("moe_intermediate_size", "num_experts", "num_experts_per_tok"), moe, strict=True)
        )
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        config |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
    return config


def named_by_transformers(kind: str, stated: dict[str, Any]) -> Shapes:
    """The tensors of a model of transformers; `kind` is how its classes are called."""
    import transformers

    left_out = ("architectures", "model_type", "auto_map", "attn_implementation")
    fields = {name: value for name, value in stated.items() if name not in left_out}
    config = getattr(transformers, f"{kind}Config")(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def sdar_tensors(which: str) -> Shapes:
    """Those of Qwen3, of which SDAR is one; an expert has matrices of its own."""
    stated = sdar_config(which)
    kind = "Qwen3Moe" if "num_experts" in stated else "Qwen3"
    return one_by_one(named_by_transformers(kind, stated))


def diffcoder_config() -> dict[str, Any]:
    """``config.json`` of Stable-DiffCoder-8B, which states neither block length nor mask."""
    return COMMON | {
        "architectures": ["StableDiffcoderForCausalLM"],
        "model_type": "llama",
        "auto_map": {"AutoModelForCausalLM": "modeling_stable_diffcoder.X"},
        "attention_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rope_theta": 500000, "vocab_size": 155136,
    }  # fmt: skip


def nemotron_config(which: str) -> dict[str, Any]:
    hidden, layers, width, theta = NEMOTRON[which]
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "rope_theta": theta, "rope_type": "yarn",
    }  # fmt: skip
    return {
        "architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion",
        "attention_bias": False, "attention_dropout": 0.0, "attn_implementation": "sdpa",
        "block_size": 32, "bos_token_id": 1, "dlm_loss_weight": None,
        "dlm_paradigm": "bidirectional", "dp_varying_mask_ratio": False, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": width,
        "mask_token_id": 100, "max_position_embeddings": 262144, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_parameters": rope, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 131072,
    }  # fmt: skip


def nemotron_tensors(which: str) -> Shapes:
    """Those of Ministral 3, under the authors' names."""
    return {
        name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head."): shape
        for name, shape in named_by_transformers("Ministral3", nemotron_config(which)).items()
    }


def fast_dllm_config() -> dict[str, Any]:
    """``config.json`` of the 7B, with the base of RoPE of the model that it was trained from."""
    return COMMON | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"}, "bd_size": 32,
        "bos_token_id": 151643, "conplemenrary_mask": True, "eos_token_id": 151645,
        "hidden_size": 3584, "intermediate_size": 18944, "layer_types": ["full_attention"] * 28,
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 151645,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 152064,
    }  # fmt: skip


def dream_config() -> dict[str, Any]:
    """``config.json`` of DreamReasoner-8B: Qwen3-8B, with blocks."""
    config = sdar_config("sdar-1.7b-chat") | {
        "architectures": ["DreamForCausalLM"], "model_type": "Dream", "block_size": 32,
        "mask_token_id": 151669, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_hidden_layers": 36, "head_dim": None,
    }  # fmt: skip
    return config


def openpangu_config() -> dict[str, Any]:
    """``config.json`` of openPangu-Embedded-7B, which is openPangu-R's, too."""
    return COMMON | {
        "architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded",
        "auto_map": {"AutoModelForCausalLM": "modeling_openpangu_dense.PanguEmbeddedForCausalLM"},
        "bias": True, "bos_token_id": 1, "eos_token_id": 45892, "pad_token_id": 0,
        "hidden_size": 4096, "intermediate_size": 12800, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 16000000.0, "vocab_size": 153376,
    }  # fmt: skip


def one_by_one(shapes: Shapes) -> Shapes:
    """Experts that stand together in one tensor, as three matrices each."""
    found: Shapes = {}
    for name, shape in shapes.items():
        prefix = name.rpartition(".")[0]
        for e in range(shape[0] if ".experts." in name and len(shape) == 3 else 0):
            if name.endswith("gate_up_proj"):
                for part in ("gate_proj", "up_proj"):
                    found[f"{prefix}.{e}.{part}.weight"] = (shape[1] // 2, shape[2])
            else:
                found[f"{prefix}.{e}.down_proj.weight"] = shape[1:]
        if not (".experts." in name and len(shape) == 3):
            found[name] = shape
    return found


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    skipped = ("vision", "self_conditioning", "router", ".gate.weight")
    return (
        len(shape) == 2
        and ".layers." in name
        and name.endswith(".weight")
        and not any(word in name for word in skipped)
    )
