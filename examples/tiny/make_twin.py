"""Write a small LLaDA2 checkpoint with random weights: a twin of the golden checkpoints.

    python examples/tiny/make_twin.py OUT [--seed 0] [--hidden 128] [--layers 3]

The architecture, tensor names and tokenizer files are those of the real models, so the
whole serving path can be run with it on a laptop. Its answers are random words. As in the
real checkpoints, ``config.json`` holds neither the mask id nor the block length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|mask|>")
ROLES = ("<role>", "</role>", "<|role_end|>", "HUMAN", "ASSISTANT", "SYSTEM", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<role> {{ 'HUMAN' if message.role == 'user' else message.role | upper }} </role> "
    "{{ message.content }} <|role_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<role> ASSISTANT </role>{% endif %}"
)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeio"]


def make_twin(
    path: Path, seed: int = 0, hidden: int = 128, layers: int = 3, vocabulary: int = 512
) -> Path:
    """Write the checkpoint to ``path`` and return it; nothing happens when it is there already."""
    made_with = {"seed": seed, "hidden": hidden, "layers": layers, "vocabulary": vocabulary}
    record = path / "twin.json"
    if record.exists() and json.loads(record.read_text()) == made_with:
        return path
    path.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    config = make_config(hidden, layers, vocabulary)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(make_weights(config, torch.Generator().manual_seed(seed)))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    make_tokenizer(vocabulary).save_pretrained(path)
    record.write_text(json.dumps(made_with) + "\n")
    return path


def make_config(hidden: int, layers: int, vocabulary: int) -> dict[str, object]:
    """The keys of a real LLaDA2 ``config.json``, in small."""
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "tie_word_embeddings": False,
        "pad_token_id": vocabulary - 4,
        "torch_dtype": "float32",
    }


def make_weights(config: dict, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Random tensors, exact in bfloat16, with a spread of the logits like a trained model's."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv_heads, small = config["num_key_value_heads"], config["moe_intermediate_size"]

    def matrix(rows: int, columns: int, gain: float = 1.6) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * gain * columns**-0.5
        return drawn.bfloat16().float()

    def mlp(name: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.gate_proj.weight", matrix(size, hidden)
        yield f"{name}.up_proj.weight", matrix(size, hidden)
        yield f"{name}.down_proj.weight", matrix(hidden, size)

    yield "model.word_embeddings.weight", matrix(config["vocab_size"], hidden, hidden**0.5)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", torch.ones(hidden)
        qkv = matrix((heads + 2 * kv_heads) * dim, hidden)
        yield f"{layer}.attention.query_key_value.weight", qkv
        yield f"{layer}.attention.dense.weight", matrix(hidden, heads * dim)
        yield f"{layer}.attention.query_layernorm.weight", torch.full((dim,), 1.5)
        yield f"{layer}.attention.key_layernorm.weight", torch.full((dim,), 1.25)
        yield f"{layer}.post_attention_layernorm.weight", torch.ones(hidden)
        if n < config["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", matrix(config["num_experts"], hidden)
        yield f"{layer}.mlp.gate.expert_bias", matrix(1, config["num_experts"], 0.3)[0].clone()
        for expert in range(config["num_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", small)
        yield from mlp(f"{layer}.mlp.shared_experts", small * config["num_shared_experts"])
    yield "model.norm.weight", torch.ones(hidden)
    yield "lm_head.weight", matrix(config["vocab_size"], hidden, 4.0)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over made-up words, with LLaDA2's special tokens and chat markers."""
    made_up = [a + b for a in SYLLABLES for b in SYLLABLES]
    words = [*ROLES, *made_up[: vocabulary - len(ROLES) - len(SPECIAL)], *SPECIAL]
    if len(words) != vocabulary:
        raise ValueError(f"vocabulary must be at most {len(made_up)} and more than 12")
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        unk_token="<unk>",
        additional_special_tokens=["[CLS]", "[gMASK]", "<role>", "</role>", "<|role_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=512)
    args = parser.parse_args()
    print(make_twin(args.out, args.seed, args.hidden, args.layers, args.vocabulary))


if __name__ == "__main__":
    main()
