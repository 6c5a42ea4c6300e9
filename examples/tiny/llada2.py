"""LLaDA2's architecture as a trainable module, in plain PyTorch.

Parameter names are the checkpoint's own, so `state_dict()` is the file. `vllm_dllm` serves
what this trains; the tests compare the two with a third implementation in between.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Shape:
    """The sizes of a small LLaDA2. Hidden sizes are multiples of 32: vLLM's CPU kernels."""

    vocab_size: int = 272
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 64
    first_k_dense_replace: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-6
    block_length: int = 32


class RMSNorm(nn.RMSNorm):
    """With the checkpoint's epsilon."""

    def __init__(self, size: int, shape: Shape) -> None:
        super().__init__(size, eps=shape.rms_norm_eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, size: int) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, size)
        self.up_proj = linear(shape.hidden_size, size)
        self.down_proj = linear(size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The router: sigmoid scores, a bias that only chooses, and groups of experts.

    `load` counts the tokens of each expert since `balance` was last called.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.num_experts, shape.hidden_size) * 0.02)
        self.register_buffer("expert_bias", torch.zeros(shape.num_experts))
        self.register_buffer("load", torch.zeros(shape.num_experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, top] twice
        shape = self.shape
        score = torch.sigmoid(x @ self.weight.T)
        with torch.no_grad():
            choice = (score + self.expert_bias).view(len(x), shape.n_group, -1)
            best = choice.topk(2, dim=-1).values.sum(-1).topk(shape.topk_group, dim=-1).indices
            keep = torch.zeros(choice.shape[:2], dtype=torch.bool).scatter_(1, best, True)
            choice = choice.masked_fill(~keep[:, :, None], -torch.inf).flatten(1)
            expert = choice.topk(shape.num_experts_per_tok, dim=-1).indices
            self.load += torch.bincount(expert.flatten(), minlength=shape.num_experts)
        weight = score.gather(1, expert)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor
        return expert, weight

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Make overloaded experts a little less likely (DeepSeek-V3's auxiliary-loss-free rule)."""
        self.expert_bias -= rate * torch.sign(self.load - self.load.mean())
        self.load.zero_()


class Experts(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Gate(shape)
        self.experts = nn.ModuleList(
            MLP(shape, shape.moe_intermediate_size) for _ in range(shape.num_experts)
        )
        self.shared_experts = MLP(shape, shape.moe_intermediate_size * shape.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        expert, weight = self.gate(flat)
        out = self.shared_experts(flat)
        order = expert.flatten().argsort(stable=True)
        token = order // expert.shape[1]
        counts = torch.bincount(expert.flatten(), minlength=len(self.experts)).tolist()
        parts = flat[token].split(counts)
        routed = torch.cat([mlp(part) for mlp, part in zip(self.experts, parts, strict=True)])
        return out.index_add(0, token, routed * weight.flatten()[order, None]).view_as(x)


class Attention(nn.Module):
    """Grouped queries, RMSNorm on Q and K, rotation of the first channels only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.query_key_value = linear(shape.hidden_size, (heads + 2 * kv) * dim)
        self.query_layernorm = RMSNorm(dim, shape)
        self.key_layernorm = RMSNorm(dim, shape)
        self.dense = linear(heads * dim, shape.hidden_size)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.attend(*self.project(x, rope), mask)

    def project(self, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, ``[rows, heads, tokens, dim]`` each."""
        shape = self.shape
        heads, kv = shape.num_attention_heads, shape.num_key_value_heads
        qkv = self.query_key_value(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([heads, kv, kv], dim=1)
        return rotate(self.query_layernorm(q), rope), rotate(self.key_layernorm(k), rope), v

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, tokens, hidden]``; keys and values may be more than the queries' own."""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dense(out.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate half-split pairs of the first channels; `rope` is (cos, sin), [2, tokens, pairs]."""
    cos, sin = rope
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Layer(nn.Module):
    """Attention, then a dense MLP in the first layers and experts in the others."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape)
        self.attention = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape)
        dense = index < shape.first_k_dense_replace
        self.mlp = MLP(shape, shape.intermediate_size) if dense else Experts(shape)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything below the head; the checkpoint calls it `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, n) for n in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape)


class LLaDA2(nn.Module):
    """Logits at every position, under the block-causal mask and without a shift."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        nn.init.normal_(self.model.word_embeddings.weight, std=0.5)
        for name, weight in self.named_parameters():
            if name.endswith(("dense.weight", "down_proj.weight")):
                # The residual stream keeps its size, however many layers add to it.
                weight.data *= (2 * shape.num_hidden_layers) ** -0.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [rows, tokens, vocabulary]
        position = torch.arange(ids.shape[1])
        block = position // self.shape.block_length
        mask = block[None, :] <= block[:, None]
        x = self.model.word_embeddings(ids)
        rope = self.rope(position)
        for layer in self.model.layers:
            x = layer(x, rope, mask)
        return self.lm_head(self.model.norm(x))

    def rope(self, position: torch.Tensor) -> torch.Tensor:
        """Cosines and sines, ``[2, *positions, pairs]``."""
        size = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        frequency = self.shape.rope_theta ** -(torch.arange(0, size, 2) / size)
        angle = position.float()[..., None] * frequency
        return torch.stack([angle.cos(), angle.sin()])

    def balance(self, rate: float) -> None:
        for module in self.modules():
            if isinstance(module, Gate):
                module.balance(rate)


def hf_config(shape: Shape, special: dict[str, int]) -> dict[str, Any]:
    """`config.json`: the keys of a real LLaDA2, and the ids and block length real ones leave out.

    `special` holds `mask_token_id`, `eos_token_id`, `bos_token_id` and `pad_token_id`.
    """
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **asdict(shape),
        **special,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "dtype": "bfloat16",
    }


def save(model: LLaDA2, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write a Hugging Face checkpoint; weights in bfloat16, the router's bias in float32."""
    path.mkdir(parents=True, exist_ok=True)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: getattr(tokenizer, name) for name in names}
    config = hf_config(model.shape, special | {"mask_token_id": tokenizer.mask_token_id})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tensors = {
        name: tensor.detach().to(torch.float32 if "expert_bias" in name else torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(path)


def load(path: Path) -> LLaDA2:
    """A checkpoint written by `save`, in float32."""
    config = json.loads((path / "config.json").read_text())
    model = LLaDA2(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()
