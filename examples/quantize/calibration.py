"""What both scripts share: arguments, samples of text, LLM Compressor's run, what it found."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from examples.quantize.files import family_of, quantize_checkpoint, scheme_named

CALIBRATED = ("fp8-dynamic", "int8", "w4a16", "nvfp4")
PARTS = ("weight_scale", "weight_global_scale", "input_global_scale")
MOST_TOKENS = 512  # of a sample of text


@dataclass(frozen=True)
class Sample:
    """A prompt, and an answer that a canvas is made of; token ids."""

    prompt: list[int]
    answer: list[int]


def arguments(description: str | None) -> argparse.Namespace:
    """Source, target, scheme, and what to calibrate on."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="a folder with an unquantized checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=CALIBRATED, required=True)
    parser.add_argument("--group-size", type=int, help="of w4a16; 128 unless given")
    parser.add_argument("--samples", type=int, default=128, help="calibration samples (nvfp4)")
    parser.add_argument(
        "--text", type=Path, help="a text, a sample a line; problems of examples/tiny unless given"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def samples(tokenizer: Any, text: Path | None, seed: int) -> Iterator[Sample]:
    """Prompts with answers: lines of a text, cut in two, or training problems of the tiny tasks."""
    if text is None:
        from examples.tiny.training import Encoder, training_examples

        for example in training_examples(Encoder(tokenizer), seed):
            yield Sample(example.prompt, example.answer)
    rng = random.Random(seed)
    for line in itertools.chain.from_iterable(itertools.repeat(text.read_text().splitlines())):
        ids = tokenizer(line, add_special_tokens=False).input_ids[:MOST_TOKENS]
        if len(ids) > 1:
            cut = rng.randrange(1, len(ids))
            yield Sample(ids[:cut], ids[cut:])


def run(
    args: argparse.Namespace,
    load: Callable[[Path], torch.nn.Module],
    batches: Callable[[], Iterator[dict[str, torch.Tensor]]],
    spellings: Callable[[str], tuple[str, ...]] = lambda name: (name,),
) -> None:
    """Let LLM Compressor find the scales, and write the checkpoint.

    Args:
        args: see `arguments`.
        load: makes the model; modules are called as in the checkpoint.
        batches: endless batches, keyword arguments of the model's `forward`.
        spellings: a module's name in the model to its names in the checkpoint.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    scheme = scheme_named(args.scheme, args.group_size)
    wants_data = args.scheme == "nvfp4"
    model = load(args.source).to(args.device)
    data = None
    if wants_data:
        chosen = list(itertools.islice(batches(), args.samples))
        data = DataLoader(chosen, batch_size=None)
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(args.source),
        dataset=data,
        recipe=QuantizationModifier(
            config_groups={"group_0": scheme}, ignore=list(family_of(args.source).ignore)
        ),
        pipeline="basic" if wants_data else "datafree",
        num_calibration_samples=args.samples,
        # The models below already show every token to every expert.
        moe_calibrate_all_experts=False,
    )
    found = {
        spelling: parts
        for name, module in model.named_modules()
        for parts in [scales_of(module)]
        if parts
        for spelling in spellings(name)
    }
    quantize_checkpoint(args.source, args.out, [scheme], found)


def scales_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What LLM Compressor left at a layer."""
    if getattr(module, "quantization_scheme", None) is None:
        return {}
    return {part: getattr(module, part).detach().cpu() for part in PARTS if hasattr(module, part)}
