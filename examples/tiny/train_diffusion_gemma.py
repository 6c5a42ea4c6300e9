"""Train `tiny-diffusiongemma` on the CPU, from nothing, in under half an hour on two cores.

    python -m examples.tiny.train_diffusion_gemma [OUT] [--steps 4500] [--seed 0]

Uniform diffusion: the encoder reads the clean prompt, tokens of the canvas are replaced by
random ones, and the loss is the cross-entropy of the clean canvas at every position. Most
canvases are cut off a little after the answer, because padding costs time and teaches
little; the others have their full length. In half of the steps the model is self-conditioned:
it first predicts without a gradient, and sees that prediction (at a temperature of the
sampler's schedule) in its second pass (Chen et al., "Analog Bits", 2022). The model is
transformers' own class, so what is trained is by construction what it and vLLM implement. The
vision tower keeps its random weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSamplerConfig,
)

from examples.tiny.tokens import gemma_processor
from examples.tiny.training import (
    Encoder,
    Example,
    options,
    report,
    train,
    training_examples,
    with_muon,
)

DEFAULT_OUT = Path(__file__).parent / "checkpoints" / "tiny-diffusiongemma"
CANVAS = 32
WORK_A_STEP = 3456  # positions: the context once, the canvas one and a half times
PEAK_LEARNING_RATE = 2e-3
ALL_NOISE, CROPPED, CONDITIONED = 0.3, 0.7, 0.5  # shares of rows, of rows, of steps
FILL_WEIGHT = 0.25  # of the padding after the answer, which teaches little
SAMPLER = {
    "max_denoising_steps": 32,
    "sampler_config": EntropyBoundSamplerConfig(entropy_bound=0.1),
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


def model_config(
    vocab_size: int, special: dict[str, int], canvas: int = CANVAS, **overrides: object
) -> DiffusionGemmaConfig:
    """DiffusionGemma in small: sliding and full layers, experts, a one-layer vision tower.

    `overrides` replace keys of the text configuration.
    """
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "sliding_window": 128,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 2048,
        "use_bidirectional_attention": "vision",
        **{name: special[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")},
        **overrides,
    }
    pattern = ["sliding_attention", "sliding_attention", "full_attention"]
    text["layer_types"] = [pattern[n % 3] for n in range(text["num_hidden_layers"])]
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        # As published. The table is of ones, so that it takes no room in a wheel.
        "position_embedding_size": 10240,
        "default_output_length": 280,
    }
    images = {name: special[name] for name in ("boi_token_id", "eoi_token_id", "image_token_id")}
    return DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=canvas, dtype="bfloat16", **images
    )


@torch.no_grad()
def initialise(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Random weights by fan-in, logits of size one, and attention that starts out soft."""
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.normal_(std=weight.shape[-1] ** -0.5)
        elif weight.ndim > 1 and "vision" not in name:
            out = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
            weight.normal_(std=weight.shape[-1] ** -0.5 * (0.3 if out else 1.0))
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            # The scores are not divided by the square root of the head size.
            weight.fill_(weight.shape[0] ** -0.25)


@dataclass(frozen=True)
class Batch:
    """Prompts, padded on the left, and the canvases that follow them."""

    context: torch.Tensor  # [rows, P]
    present: torch.Tensor  # [rows, P] bool: not padding
    canvas: torch.Tensor  # [rows, l], l at most CANVAS
    weight: torch.Tensor  # [rows, l], 1 in all for each row: short answers count as much


def batches(examples: Iterator[Example], work: int, pad: int, seed: int) -> Iterator[Batch]:
    """Collect examples of similar length and choose one canvas of each answer to practise."""
    generator = torch.Generator().manual_seed(seed)
    waiting: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for example in examples:
        canvases = -(-len(example.answer) // CANVAS)
        start = CANVAS * int(torch.randint(canvases, (), generator=generator))
        context = example.prompt + example.answer[:start]
        answer = example.answer[start : start + CANVAS]
        cropped = float(torch.rand((), generator=generator)) < CROPPED
        widths = _eights(len(context)), min(_eights(len(answer) + 1), CANVAS) if cropped else CANVAS
        rows = waiting[widths]
        rows.append((context, answer))
        if len(rows) * (widths[0] + 1.5 * widths[1]) >= work:
            yield _batch(waiting.pop(widths), *widths, pad)


def _eights(length: int) -> int:
    return -(-length // 8) * 8


def _batch(rows: list[tuple[list[int], list[int]]], full: int, width: int, pad: int) -> Batch:
    context = torch.tensor([[pad] * (full - len(before)) + before for before, _ in rows])
    canvas = torch.tensor([after + [pad] * (width - len(after)) for _, after in rows])
    lengths = torch.tensor([[len(after)] for _, after in rows])
    starts = torch.tensor([[full - len(before)] for before, _ in rows])
    weight = torch.where(torch.arange(width) < lengths, 1.0, FILL_WEIGHT)
    weight = weight / weight.sum(1, keepdim=True)
    return Batch(context, torch.arange(full) >= starts, canvas, weight)


def corrupt(canvas: torch.Tensor, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Replace a random share of each row by uniform random tokens."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    rows, length = canvas.shape
    level = torch.where(draw(rows, 1) < ALL_NOISE, 1.0, draw(rows, 1))
    noise = torch.randint(vocab_size, canvas.shape, generator=generator)
    return torch.where(draw(rows, length) < level, noise, canvas)


def loss_of(
    model: DiffusionGemmaForBlockDiffusion, batch: Batch, generator: torch.Generator
) -> torch.Tensor:
    """Cross-entropy of the clean canvas; in half of the steps the model sees a prediction first."""
    rows, width = batch.canvas.shape
    noisy = corrupt(batch.canvas, model.lm_head.weight.shape[0], generator)
    position = (batch.present.cumsum(1) - 1).clamp(min=0)
    encoded = model.model.encoder(
        input_ids=batch.context, attention_mask=batch.present, position_ids=position
    )
    decode = partial(
        model,
        past_key_values=encoded.past_key_values,
        decoder_input_ids=noisy,
        decoder_attention_mask=F.pad(batch.present, (0, width), value=True),
        decoder_position_ids=position[:, -1:] + 1 + torch.arange(width),
    )
    earlier = None
    if float(torch.rand((), generator=generator)) < CONDITIONED:
        span = SAMPLER["t_max"] - SAMPLER["t_min"]
        temperature = SAMPLER["t_min"] + span * torch.rand(rows, 1, 1, generator=generator)
        with torch.no_grad():
            earlier = decode().logits / temperature
    logits = decode(self_conditioning_logits=earlier).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.canvas.flatten(), reduction="none")
    return (loss * batch.weight.flatten()).sum() / rows


def generate(
    model: DiffusionGemmaForBlockDiffusion, prompts: list[list[int]]
) -> tuple[list[list[int]], float]:
    """Answer with the class's own `generate`, prompts of one length at a time."""
    answers: dict[int, list[int]] = {}
    same: dict[int, list[int]] = defaultdict(list)
    steps = canvases = 0.0
    for index, prompt in enumerate(prompts):
        same[len(prompt)].append(index)
    torch.manual_seed(0)
    end = model.generation_config.eos_token_id
    for length, indices in same.items():
        ids = torch.tensor([prompts[index] for index in indices])
        out = model.generate(ids, max_new_tokens=2 * CANVAS)
        new = out.sequences[:, length:]
        valid = (new != model.generation_config.pad_token_id).sum(1)
        some = valid > 0  # the class reports steps as tokens per step
        steps += float((valid / out.tokens_per_forward)[some].sum())
        canvases += float((-(-valid // CANVAS)).sum())
        for index, row in zip(indices, new.tolist(), strict=True):
            answers[index] = row[: row.index(end)] if end in row else row
    return [answers[index] for index in range(len(prompts))], steps / max(canvases, 1)


def main() -> None:
    args = options(__doc__, DEFAULT_OUT, steps=4500)
    processor = gemma_processor()
    tokenizer = processor.tokenizer
    kinds = ("pad", "eos", "bos", "boi", "eoi", "image")
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in kinds}
    model = DiffusionGemmaForBlockDiffusion(model_config(_eights(len(tokenizer)), special))
    initialise(model)
    encoder, generator = Encoder(tokenizer), torch.Generator().manual_seed(args.seed)
    examples = training_examples(encoder, args.seed)
    stream = batches(examples, WORK_A_STEP, tokenizer.pad_token_id, args.seed)
    seconds = train(
        model,
        lambda: loss_of(model, next(stream), generator),
        args.steps,
        with_muon(model, PEAK_LEARNING_RATE),
    )
    ends = {name: special[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    model.generation_config = DiffusionGemmaGenerationConfig(max_new_tokens=256, **SAMPLER, **ends)
    model.to(torch.bfloat16).save_pretrained(args.out)
    processor.save_pretrained(args.out)
    saved = DiffusionGemmaForBlockDiffusion.from_pretrained(args.out, dtype=torch.float32)
    facts = {"steps": args.steps, "seed": args.seed, "seconds": round(seconds)}
    report(args.out, encoder, partial(generate, saved), args.held_out, facts)


if __name__ == "__main__":
    main()
