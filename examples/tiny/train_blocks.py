"""Fine-tune `tiny-llada2` for multi-block decoding, in a quarter of an hour on one core.

    python -m examples.tiny.train_blocks [OUT] [--steps 1800] [--seed 0]

Blocks get shorter, so that an answer has several, and a canvas holds four of them. The context is
clean, and the blocks of the canvas are masked as multi-block decoding meets them: a later block
more than an earlier one, as in D2F (arXiv 2508.09192). Blocks that would not be open yet, because
the one before has hardly begun, do not count in the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from examples.tiny.llada2 import LLaDA2, load, save
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.train_llada2 import (
    ALL_MASKED,
    BALANCE_RATE,
    DEFAULT_OUT,
    FILL_WEIGHT,
    TOKENS_A_STEP,
    generate,
)
from examples.tiny.training import (
    Encoder,
    Example,
    options,
    report,
    train,
    training_examples,
    with_adamw,
)

CHECKPOINT = DEFAULT_OUT.parent / "tiny-llada2-blocks"
BLOCK, BLOCKS = 8, 4
BLOCKS_OF_ANSWER = 6  # the longest answer has so many
PEAK_LEARNING_RATE = 1e-3
OPENS = 0.1  # of the block before is decided, and a block opens: `decoding.blocks.ADD_BLOCK`


@dataclass(frozen=True)
class Batch:
    """Sequences of one length that end with their canvas, or with the answer's last block."""

    tokens: torch.Tensor  # [rows, T]
    nth: torch.Tensor  # [rows, T]: the block of the canvas, negative before it
    weight: torch.Tensor  # [rows, T]: 0 outside the answer's tokens of the canvas


def batches(examples: Iterator[Example], seed: int) -> Iterator[Batch]:
    """Collect examples by length and choose one canvas of each answer to practise."""
    generator = torch.Generator().manual_seed(seed)
    waiting: dict[int, list[tuple[list[int], int, int, int]]] = defaultdict(list)
    for example in examples:
        prompt, end = len(example.prompt), len(example.prompt) + len(example.answer)
        first, last = prompt // BLOCK, (end - 1) // BLOCK
        chosen = int(torch.randint((last - first) // BLOCKS + 1, (), generator=generator))
        begin = first + chosen * BLOCKS
        fill = example.answer[-1:] * ((last + 1) * BLOCK - end)
        tokens = [*example.prompt, *example.answer, *fill][: (begin + BLOCKS) * BLOCK]
        rows = waiting[len(tokens)]
        rows.append((tokens, begin, prompt, end))
        if len(rows) * len(tokens) >= TOKENS_A_STEP:
            ids, begins, starts, ends = (torch.tensor(part) for part in zip(*rows, strict=True))
            at = torch.arange(ids.shape[1])
            nth = at // BLOCK - begins[:, None]
            weight = torch.where(at < ends[:, None], 1.0, FILL_WEIGHT)
            yield Batch(ids, nth, weight * ((at >= starts[:, None]) & (nth >= 0)))
            rows.clear()


def corrupt(
    batch: Batch, mask: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences as the model will see them, and the loss weight of each position.

    The share of masks rises in a line from block to block, at most to 1.
    """
    rows = len(batch.tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    slope = 0.2 + 0.8 * draw(rows, 1)
    first = torch.where(draw(rows, 1) < ALL_MASKED, 1.0, 1 - BLOCKS * draw(rows, 1))
    level = first + slope * batch.nth
    masked = (draw(*batch.tokens.shape) < level) & (batch.weight > 0)
    share = masked.unflatten(1, (-1, BLOCK)).float().mean(2)  # [rows, blocks]
    opens = F.pad(share[:, :-1] <= 1 - OPENS, (1, 0), value=True) | (batch.nth[:, ::BLOCK] == 0)
    opens = opens.repeat_interleave(BLOCK, dim=1)
    return batch.tokens.masked_fill(masked, mask), batch.weight * (masked & opens)


def loss_of(model: LLaDA2, batch: Batch, mask: int, generator: torch.Generator) -> torch.Tensor:
    """Cross-entropy of the masked tokens of open blocks."""
    seen, weight = corrupt(batch, mask, generator)
    counts = weight.flatten() > 0
    loss = F.cross_entropy(
        model(seen).flatten(0, 1)[counts], batch.tokens.flatten()[counts], reduction="none"
    )
    return (loss * weight.flatten()[counts]).sum() / weight.sum().clamp_min(1.0)


def main() -> None:
    args = options(__doc__, CHECKPOINT, steps=1800, threads=1)
    tokenizer, trained = llada2_tokenizer(), load(DEFAULT_OUT)
    model = LLaDA2(replace(trained.shape, block_length=BLOCK))
    model.load_state_dict(trained.state_dict())
    mask, end = tokenizer.mask_token_id, tokenizer.eos_token_id
    encoder, generator = Encoder(tokenizer), torch.Generator().manual_seed(args.seed)
    stream = batches(training_examples(encoder, args.seed), args.seed)

    def loss_of_next() -> torch.Tensor:
        model.balance(BALANCE_RATE)
        return loss_of(model, next(stream), mask, generator)

    seconds = train(model, loss_of_next, args.steps, with_adamw(model, PEAK_LEARNING_RATE))
    save(model, tokenizer, args.out)
    facts = {"steps": args.steps, "seed": args.seed, "seconds": round(seconds)}
    room = BLOCKS_OF_ANSWER
    answer = partial(generate, load(args.out), mask=mask, end=end, room=room)
    report(args.out, encoder, answer, args.held_out, facts)


if __name__ == "__main__":
    main()
