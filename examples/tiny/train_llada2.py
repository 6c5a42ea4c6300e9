"""Train `tiny-llada2` on the CPU, from nothing, in under half an hour on two cores.

    python -m examples.tiny.train_llada2 [OUT] [--steps 6000] [--seed 0]

Block diffusion: the context is clean, the current block is partly masked, attention is
block-causal, and the loss is the cross-entropy of the masked tokens (Arriola et al.,
"Block Diffusion", 2025; LLaDA2.0 technical report, 2025). A quarter of the examples also
carry wrong visible tokens, which the model learns to overwrite (token-to-token editing,
LLaDA2.1): there every position of the block counts in the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from examples.tiny.llada2 import LLaDA2, Shape, load, save
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.training import (
    Encoder,
    Example,
    options,
    report,
    train,
    training_examples,
    with_adamw,
)

DEFAULT_OUT = Path(__file__).parent / "checkpoints" / "tiny-llada2"
TOKENS_A_STEP = 2560
PEAK_LEARNING_RATE = 2e-3
BALANCE_RATE = 1e-3
ALL_MASKED, EDITED, WRONG = 0.3, 0.25, 0.15  # shares of examples, examples, visible tokens
FILL_WEIGHT = 0.25  # of the end-of-sequence tokens after the first, which teach little


@dataclass(frozen=True)
class Batch:
    """Sequences that end with their current block."""

    tokens: torch.Tensor  # [rows, T]
    free: torch.Tensor  # [rows, L]: positions of the current block that are not prompt
    weight: torch.Tensor  # [rows, L]


def batches(examples: Iterator[Example], block: int, seed: int) -> Iterator[Batch]:
    """Collect examples by length and choose one block of each answer to practise."""
    generator = torch.Generator().manual_seed(seed)
    waiting: dict[int, list[tuple[list[int], int, int]]] = defaultdict(list)
    for example in examples:
        prompt, end = len(example.prompt), len(example.prompt) + len(example.answer)
        first, last = prompt // block, (end - 1) // block
        chosen = int(torch.randint(first, last + 1, (), generator=generator))
        fill = example.answer[-1:] * ((last + 1) * block - end)
        tokens = [*example.prompt, *example.answer, *fill][: (chosen + 1) * block]
        rows = waiting[len(tokens)]
        rows.append((tokens, prompt - chosen * block, end - chosen * block))
        if len(rows) * len(tokens) >= TOKENS_A_STEP:
            ids, starts, ends = (torch.tensor(part) for part in zip(*rows, strict=True))
            at = torch.arange(block)
            weight = torch.where(at < ends[:, None], 1.0, FILL_WEIGHT)
            yield Batch(ids, at >= starts[:, None], weight)
            rows.clear()


def corrupt(
    batch: Batch, mask: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The current blocks as the model will see them, and the loss weight of each position.

    Wrong tokens come from other rows at the same position, so that they look plausible.
    """
    rows, block = batch.free.shape
    clean = batch.tokens[:, -block:]

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    level = torch.where(draw(rows, 1) < ALL_MASKED, 1.0, draw(rows, 1))
    masked = (draw(rows, block) < level) & batch.free
    edited = draw(rows, 1) < EDITED
    wrong = edited & batch.free & ~masked & (draw(rows, block) < WRONG)
    seen = torch.where(wrong, clean.roll(1, dims=0), clean).masked_fill(masked, mask)
    return seen, batch.weight * (masked | (edited & batch.free))


def loss_of(model: LLaDA2, batch: Batch, mask: int, generator: torch.Generator) -> torch.Tensor:
    """Cross-entropy of the hidden and the edited tokens of the current blocks."""
    seen, weight = corrupt(batch, mask, generator)
    block = seen.shape[1]
    logits = model(torch.cat([batch.tokens[:, :-block], seen], dim=1))[:, -block:]
    target = batch.tokens[:, -block:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum()


@torch.no_grad()
def generate(
    model: LLaDA2,
    prompts: list[list[int]],
    mask: int,
    end: int,
    threshold: float = 0.9,
    room: int = 2,
) -> tuple[list[list[int]], float]:
    """Answer all prompts at once by low confidence, recomputing everything at every step.

    Rows of any length share a batch, because no block sees a later one. An answer has at most
    `room` blocks. Returns the tokens before `end`, and the mean number of steps that a block took.
    """
    block = model.shape.block_length
    blocks = max(len(prompt) for prompt in prompts) // block + room
    ids = torch.full((len(prompts), blocks * block), mask)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    start = torch.tensor([len(prompt) // block for prompt in prompts])
    current, steps, done = start.clone(), 0, 0
    active = torch.arange(len(prompts))
    while len(active):
        at = current[active, None] * block + torch.arange(block)
        canvas = ids[active[:, None], at]
        logits = model(ids[active, : int(at.max()) + 1])
        logits = logits[torch.arange(len(active))[:, None], at]
        probability, token = logits.softmax(-1).max(-1)
        probability = probability.masked_fill(canvas != mask, -1.0)
        keep = (probability > threshold) | (probability == probability.amax(1, keepdim=True))
        ids[active[:, None], at] = canvas = torch.where(keep & (canvas == mask), token, canvas)
        steps += len(active)
        full = (canvas != mask).all(1)
        done += int(full.sum())
        ended = full & ((canvas == end).any(1) | (current[active] + 1 == start[active] + room))
        current[active[full]] += 1
        active = active[~ended]
    answers = [row[len(prompt) :] for row, prompt in zip(ids.tolist(), prompts, strict=True)]
    return [row[: row.index(end)] if end in row else row for row in answers], steps / done


def main() -> None:
    args = options(__doc__, DEFAULT_OUT, steps=6000)
    tokenizer, model = llada2_tokenizer(), LLaDA2(Shape())
    mask, end = tokenizer.mask_token_id, tokenizer.eos_token_id
    encoder, generator = Encoder(tokenizer), torch.Generator().manual_seed(args.seed)
    stream = batches(training_examples(encoder, args.seed), model.shape.block_length, args.seed)

    def loss_of_next() -> torch.Tensor:
        model.balance(BALANCE_RATE)
        return loss_of(model, next(stream), mask, generator)

    seconds = train(model, loss_of_next, args.steps, with_adamw(model, PEAK_LEARNING_RATE))
    save(model, tokenizer, args.out)
    facts = {"steps": args.steps, "seed": args.seed, "seconds": round(seconds)}
    answer = partial(generate, load(args.out), mask=mask, end=end)
    report(args.out, encoder, answer, args.held_out, facts)


if __name__ == "__main__":
    main()
