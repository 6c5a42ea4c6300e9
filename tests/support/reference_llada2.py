"""LLaDA2 in a hundred lines of float32 PyTorch, recomputing everything: the tests' own reference.

It is checked against the golden vectors, so that it may stand in for them on shapes that they do
not cover. `random_checkpoint` writes such a shape to disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support import reference
from tests.support.reference import Rule

__all__ = ["Reference", "Rule", "random_checkpoint", "swiglu", "write_tokenizer"]
SPECIAL = ("<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|mask|>")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def swiglu(x: torch.Tensor, w: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate = torch.nn.functional.silu(x @ w[f"{prefix}.gate_proj.weight"].T)
    return (gate * (x @ w[f"{prefix}.up_proj.weight"].T)) @ w[f"{prefix}.down_proj.weight"].T


@dataclass
class Reference(reference.Reference):
    """One checkpoint with one block length."""

    config: dict
    weights: dict[str, torch.Tensor]
    block: int
    mask: int

    @classmethod
    def load(cls, path: Path, block: int, mask: int) -> Reference:
        weights = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
        return cls(json.loads((path / "config.json").read_text()), weights, block, mask)

    def logits(self, ids: list[int], start: int | None = None) -> torch.Tensor:
        return self.head(self.hidden_states(ids)[-1])

    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:  # [tokens, hidden] each
        c, w = self.config, self.weights
        eps = c["rms_norm_eps"]
        h = w["model.word_embeddings.weight"][torch.tensor(ids)]
        outputs = []
        for n in range(c["num_hidden_layers"]):
            p = f"model.layers.{n}"
            x = rms_norm(h, w[f"{p}.input_layernorm.weight"], eps)
            h = h + self._attention(x, f"{p}.attention")
            x = rms_norm(h, w[f"{p}.post_attention_layernorm.weight"], eps)
            dense = n < c["first_k_dense_replace"]
            h = h + (swiglu(x, w, f"{p}.mlp") if dense else self._experts(x, f"{p}.mlp"))
            outputs.append(h)
        return outputs

    def head(self, h: torch.Tensor) -> torch.Tensor:  # [tokens, vocabulary]
        w = self.weights
        tied = self.config["tie_word_embeddings"]
        head = w["model.word_embeddings.weight" if tied else "lm_head.weight"]
        return rms_norm(h, w["model.norm.weight"], self.config["rms_norm_eps"]) @ head.T

    def _attention(self, x: torch.Tensor, p: str) -> torch.Tensor:
        c, w, tokens = self.config, self.weights, len(x)
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        qkv = (x @ w[f"{p}.query_key_value.weight"].T).view(tokens, heads + 2 * kv, dim)
        q, k, v = qkv.split([heads, kv, kv], dim=1)
        q = self._rope(rms_norm(q, w[f"{p}.query_layernorm.weight"], c["rms_norm_eps"]))
        k = self._rope(rms_norm(k, w[f"{p}.key_layernorm.weight"], c["rms_norm_eps"]))
        k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        block = torch.arange(tokens) // self.block
        scores = scores.masked_fill(block[None, None, :] > block[None, :, None], -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(tokens, heads * dim)
        return out @ w[f"{p}.dense.weight"].T

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        rotary = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        half = torch.arange(0, rotary, 2).float() / rotary
        angle = torch.outer(torch.arange(len(x)).float(), self.config["rope_theta"] ** -half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _experts(self, x: torch.Tensor, p: str) -> torch.Tensor:
        c, w = self.config, self.weights
        score = torch.sigmoid(x @ w[f"{p}.gate.weight"].T)
        choice = score + w[f"{p}.gate.expert_bias"]
        grouped = choice.view(len(x), c["n_group"], -1)
        group = grouped.topk(2, dim=-1).values.sum(-1).topk(c["topk_group"], dim=-1).indices
        keep = torch.zeros(len(x), c["n_group"], dtype=torch.bool).scatter_(1, group, True)
        keep = keep[:, :, None].expand_as(grouped).reshape_as(choice)
        top = choice.masked_fill(~keep, -torch.inf).topk(c["num_experts_per_tok"], dim=-1).indices
        weight = score.gather(1, top)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        out = swiglu(x, w, f"{p}.shared_experts")
        for expert in top.unique().tolist():
            token, nth = (top == expert).nonzero(as_tuple=True)
            own = swiglu(x[token], w, f"{p}.experts.{expert}")
            out.index_add_(0, token, weight[token, nth, None] * own)
        return out


def random_checkpoint(path: Path, seed: int, **shape: object) -> dict:
    """Write a checkpoint of random weights whose values are exact in bfloat16."""
    config = {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 300,
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "score_function": "sigmoid", "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True, "rope_theta": 600000, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32",
    } | shape  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(_random_weights(config, seed), path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, config["vocab_size"], config.get("mask_token_id"))
    return config


def _random_weights(c: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.6) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * scale * columns**-0.5
        return drawn.bfloat16().float()

    def mlp(prefix: str, size: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": matrix(size, hidden),
            f"{prefix}.up_proj.weight": matrix(size, hidden),
            f"{prefix}.down_proj.weight": matrix(hidden, size),
        }

    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    w = {"model.word_embeddings.weight": matrix(c["vocab_size"], hidden, hidden**0.5)}
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = matrix(c["vocab_size"], hidden, 4.0)
    else:
        w["model.word_embeddings.weight"] *= 0.25
    w["model.norm.weight"] = torch.ones(hidden)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}"
        w[f"{p}.input_layernorm.weight"] = torch.ones(hidden)
        w[f"{p}.post_attention_layernorm.weight"] = torch.ones(hidden)
        w[f"{p}.attention.query_key_value.weight"] = matrix(
            (heads + 2 * c["num_key_value_heads"]) * dim, hidden
        )
        w[f"{p}.attention.dense.weight"] = matrix(hidden, heads * dim)
        w[f"{p}.attention.query_layernorm.weight"] = torch.full((dim,), 1.5)
        w[f"{p}.attention.key_layernorm.weight"] = torch.full((dim,), 1.25)
        if n < c["first_k_dense_replace"]:
            w |= mlp(f"{p}.mlp", c["intermediate_size"])
            continue
        w[f"{p}.mlp.gate.weight"] = matrix(c["num_experts"], hidden)
        w[f"{p}.mlp.gate.expert_bias"] = matrix(1, c["num_experts"], 0.3)[0].contiguous()
        for expert in range(c["num_experts"]):
            w |= mlp(f"{p}.mlp.experts.{expert}", c["moe_intermediate_size"])
        w |= mlp(f"{p}.mlp.shared_experts", c["moe_intermediate_size"] * c["num_shared_experts"])
    return w


def write_tokenizer(path: Path, vocabulary: int, mask: int | None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"t{i}" for i in range(vocabulary)]
    words[-5:] = SPECIAL
    if mask is not None:
        words[mask], words[-1] = "<|mask|>", f"t{mask}"
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
    ).save_pretrained(path)
