"""Train `tiny-sdar` on the CPU, from nothing, in under half an hour on two cores.

    python -m examples.tiny.train_sdar [OUT] [--steps 4000] [--seed 0]

Qwen3 of `transformers` learns to fill blocks of 4. All blocks of a sequence are practised in one
pass: the model reads the sequence twice, once as it is and once partly masked. A masked block sees
itself and the clean blocks before it (Arriola et al., "Block Diffusion", 2025, the training of
SDAR). The loss is the cross-entropy of the masked tokens of the answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tiny.tokens import sdar_tokenizer
from examples.tiny.training import (
    Encoder,
    Example,
    options,
    report,
    train,
    training_examples,
    with_muon,
)

DEFAULT_OUT = Path(__file__).parent / "checkpoints" / "tiny-sdar"
BLOCK = 4
TOKENS_A_STEP = 2560
PEAK_LEARNING_RATE = 2e-3
ALL_MASKED = 0.3  # share of blocks of which nothing is seen
SIZES = {
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Batch:
    """Whole blocks of sequences; what follows the last block of an answer weighs nothing."""

    tokens: torch.Tensor  # [rows, T]
    answer: torch.Tensor  # bool [rows, T]: positions that may be masked, and count


def batches(examples: Iterator[Example]) -> Iterator[Batch]:
    """Collect examples of about the same length. Blocks end with end-of-sequence tokens."""
    waiting: dict[int, list[tuple[list[int], int, int]]] = defaultdict(list)
    for example in examples:
        prompt, end = len(example.prompt), len(example.prompt) + len(example.answer)
        behind = -(-end // BLOCK) * BLOCK
        length = -(-end // 16) * 16
        tokens = [*example.prompt, *example.answer, *example.answer[-1:] * (length - end)]
        rows = waiting[length]
        rows.append((tokens, prompt, behind))
        if len(rows) * length >= TOKENS_A_STEP:
            ids, first, last = (torch.tensor(part) for part in zip(*rows, strict=True))
            at = torch.arange(length)
            yield Batch(ids, (at >= first[:, None]) & (at < last[:, None]))
            rows.clear()


def seen_twice(length: int) -> torch.Tensor:
    """Which keys each query sees, bool ``[2T, 2T]``: first T clean tokens, then T masked ones."""
    block = torch.arange(length) // BLOCK
    clean = block[None, :] <= block[:, None]
    before = block[None, :] < block[:, None]
    own = block[None, :] == block[:, None]
    return torch.cat([torch.cat([clean, torch.zeros_like(clean)], 1), torch.cat([before, own], 1)])


def read(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, sees: torch.Tensor, length: int
) -> torch.Tensor:
    """Logits ``[rows, n, vocabulary]`` of tokens ``[rows, n]``; position i sees j where `sees`.

    `sees` is bool ``[n, n]``. Positions are counted from 0 again at `length`.
    """
    hidden = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    logits: torch.Tensor = model(
        input_ids=tokens,
        attention_mask=hidden[None, None].expand(len(tokens), 1, -1, -1),
        position_ids=(torch.arange(tokens.shape[1]) % length).expand(len(tokens), -1),
        use_cache=False,
    ).logits
    return logits


def loss_of(
    model: Qwen3ForCausalLM, batch: Batch, mask: int, generator: torch.Generator
) -> torch.Tensor:
    """Cross-entropy of the masked tokens; each block is masked to a degree of its own."""
    rows, length = batch.tokens.shape

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    blocks = length // BLOCK
    level = torch.where(draw(rows, blocks) < ALL_MASKED, 1.0, draw(rows, blocks))
    hidden = (draw(rows, length) < level.repeat_interleave(BLOCK, 1)) & batch.answer
    both = torch.cat([batch.tokens, batch.tokens.masked_fill(hidden, mask)], 1)
    logits = read(model, both, seen_twice(length), length)[:, length:]
    return F.cross_entropy(logits[hidden], batch.tokens[hidden])


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM, prompts: list[list[int]], mask: int, end: int, threshold: float = 0.9
) -> tuple[list[list[int]], float]:
    """Answer each prompt by low confidence, recomputing everything at every step.

    Returns the tokens before `end`, and the mean number of steps that a block took.
    """
    answers, steps, blocks = [], 0, 0
    for prompt in prompts:
        ids = list(prompt)
        while end not in ids[len(prompt) :] and len(ids) < len(prompt) + 64:
            ids += [mask] * (BLOCK - len(ids) % BLOCK)
            at = torch.arange(len(ids)) // BLOCK
            sees = at[None, :] <= at[:, None]
            blocks += 1
            while mask in ids[len(prompt) :]:
                logits = read(model, torch.tensor([ids]), sees, len(ids))[0, -BLOCK:]
                probability, token = logits.softmax(-1).max(-1)
                open_ = torch.tensor(ids[-BLOCK:]) == mask
                probability = probability.masked_fill(~open_, -1.0)
                for n in range(BLOCK):
                    sure = probability[n] > threshold or n == int(probability.argmax())
                    if open_[n] and sure:
                        ids[n - BLOCK] = int(token[n])
                steps += 1
        answer = ids[len(prompt) :]
        answers.append(answer[: answer.index(end)] if end in answer else answer)
    return answers, steps / blocks


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write a checkpoint as SDAR's are published, in bfloat16."""
    end, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.to(torch.bfloat16).save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    stated |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": BLOCK}
    stated |= {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": end}
    (path / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    generation = {"eos_token_id": [turn, end], "pad_token_id": end}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(path)


def main() -> None:
    args = options(__doc__, DEFAULT_OUT, steps=4000)
    tokenizer = sdar_tokenizer()
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()
    mask, turn = tokenizer.mask_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    encoder, generator = Encoder(tokenizer, turn), torch.Generator().manual_seed(args.seed)
    stream = batches(training_examples(encoder, args.seed))

    def loss_of_next() -> torch.Tensor:
        return loss_of(model, next(stream), mask, generator)

    seconds = train(model, loss_of_next, args.steps, with_muon(model, PEAK_LEARNING_RATE))
    save(model, tokenizer, args.out)
    facts = {"steps": args.steps, "seed": args.seed, "seconds": round(seconds)}
    answer = partial(generate, model.float(), mask=mask, end=turn)
    report(args.out, encoder, answer, args.held_out, facts)


if __name__ == "__main__":
    main()
