"""Teach a tiny checkpoint to answer in JSON where the prompt says so, in ten minutes on one core.

    python -m examples.tiny.learn_json llada2 OUT [--steps 1600] [--seed 1]
    python -m examples.tiny.learn_json diffusion_gemma OUT [--steps 600]

It goes on from the published checkpoint. Three quarters of the problems are asked `as_json`, the
others as before. So a benchmark can ask whether a constraint on the answer keeps what a model knows
about the form of its answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DiffusionGemmaForBlockDiffusion

from examples.tiny import train_diffusion_gemma, train_llada2
from examples.tiny.llada2 import load, save
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, train, training_examples, with_adamw, with_muon

JSON_SHARE = 0.75
PEAK_LEARNING_RATE = 1e-3


def llada2(out: Path, steps: int, seed: int) -> None:
    """Go on with `tiny-llada2` and save to a folder."""
    tokenizer, model = llada2_tokenizer(), load(train_llada2.DEFAULT_OUT)
    generator = torch.Generator().manual_seed(seed)
    examples = training_examples(Encoder(tokenizer), seed, JSON_SHARE)
    stream = train_llada2.batches(examples, model.shape.block_length, seed)

    def loss_of_next() -> torch.Tensor:
        model.balance(train_llada2.BALANCE_RATE)
        return train_llada2.loss_of(model, next(stream), tokenizer.mask_token_id, generator)

    train(model, loss_of_next, steps, with_adamw(model, PEAK_LEARNING_RATE))
    save(model, tokenizer, out)


def diffusion_gemma(out: Path, steps: int, seed: int) -> None:
    """Go on with `tiny-diffusiongemma` and save to a folder."""
    processor = gemma_processor()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        train_diffusion_gemma.DEFAULT_OUT, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    examples = training_examples(Encoder(processor.tokenizer), seed, JSON_SHARE)
    stream = train_diffusion_gemma.batches(
        examples, train_diffusion_gemma.WORK_A_STEP, processor.tokenizer.pad_token_id, seed
    )
    train(
        model,
        lambda: train_diffusion_gemma.loss_of(model, next(stream), generator),
        steps,
        with_muon(model, PEAK_LEARNING_RATE),
    )
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)


FAMILIES: dict[str, tuple[Callable[[Path, int, int], None], int]] = {
    "llada2": (llada2, 1600),
    "diffusion_gemma": (diffusion_gemma, 600),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    learn, steps = FAMILIES[args.family]
    learn(args.out, steps if args.steps is None else args.steps, args.seed)


if __name__ == "__main__":
    main()
