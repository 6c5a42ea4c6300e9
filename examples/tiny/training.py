"""What both training scripts share: the stream of examples, the loop, the report."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from examples.tiny.muon import Muon
from examples.tiny.tasks import TASKS, Problem, held_out_set, problems

# The tasks that take the most practice are drawn more often.
WEIGHTS = {"add": 2, "subtract": 2, "sort": 3, "evaluate": 3}
WEIGHT_DECAY = 0.05
MUON_FACTOR = 5  # of AdamW's learning rate
# What belongs to AdamW: embeddings and heads, routers, and a vision tower that sees no image.
NOT_A_LAYER = ("embed", "lm_head", "router", "gate.weight", "vision")

Optimizers = list[tuple[torch.optim.Optimizer, float]]  # with their peak learning rates


@dataclass(frozen=True)
class Example:
    """A problem as tokens: the chat prompt, and the answer with its end-of-sequence token."""

    problem: Problem
    prompt: list[int]
    answer: list[int]


class Encoder:
    """Problems to tokens, through the tokenizer's own chat template.

    Answers end with the token `end`, by default the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id if end is None else end
        message = [{"role": "user", "content": "\0"}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        self._before, self._after = chat.split("\0")

    def __call__(self, problem: Problem) -> Example:
        text = self._before + problem.prompt + self._after
        encode = self.tokenizer.backend_tokenizer.encode
        answer = encode(problem.answer, add_special_tokens=False).ids
        prompt = encode(text, add_special_tokens=False).ids
        return Example(problem, prompt, [*answer, self.end])


def training_examples(encoder: Encoder, seed: int) -> Iterator[Example]:
    """An endless, seeded mixture of all tasks; never a held-out problem."""
    rng = random.Random(seed)
    streams = {task: problems(task, seed, test=False) for task in TASKS}
    names, weights = list(TASKS), [WEIGHTS.get(task, 1) for task in TASKS]
    while True:
        yield encoder(next(streams[rng.choices(names, weights)[0]]))


def learning_rate(step: int, steps: int) -> float:
    """As a share of the peak: linear warm-up over 2 % of the steps, then a cosine to nothing."""
    warm = max(1, steps // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def with_adamw(model: torch.nn.Module, peak: float) -> Optimizers:
    """AdamW for everything, at a peak learning rate of `peak`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [(_adamw(trained, peak), peak)]


def with_muon(model: torch.nn.Module, peak: float) -> Optimizers:
    """Muon for layers, AdamW for what reads or chooses: embeddings, routers, norms."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    layers = [p for name, p in trained if p.ndim > 1 and not any(k in name for k in NOT_A_LAYER)]
    others = [p for name, p in trained if p.ndim <= 1 or any(k in name for k in NOT_A_LAYER)]
    muon = Muon(layers, lr=MUON_FACTOR * peak, weight_decay=WEIGHT_DECAY)
    return [(muon, MUON_FACTOR * peak), (_adamw(others, peak), peak)]


def _adamw(parameters: list[torch.nn.Parameter], peak: float) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def train(
    model: torch.nn.Module,
    loss_of_next: Callable[[], torch.Tensor],
    steps: int,
    optimizers: Optimizers,
) -> float:
    """Minimise `loss_of_next()`; returns the seconds it took."""
    model.train()
    begin, smooth = time.monotonic(), None
    with tqdm(range(steps), unit="step", mininterval=2) as bar:
        for step in bar:
            rate = learning_rate(step, steps)
            loss = loss_of_next()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, peak in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * peak
                optimizer.step()
                optimizer.zero_grad()
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
    model.eval()
    return time.monotonic() - begin


def options(description: str, out: Path, steps: int, threads: int = 2) -> argparse.Namespace:
    """The options of a training script, whose threads and seed are set; `out` is where it saves."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=out)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--held-out", type=int, default=100, help="problems a task in the report")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    return args


def report(
    path: Path,
    encoder: Encoder,
    answer: Callable[[list[list[int]]], tuple[list[list[int]], float]],
    per_task: int,
    facts: dict[str, object],
) -> None:
    """Exact match on held-out problems, printed and written to `training.json`.

    `answer` maps prompts to (tokens up to and without the end-of-sequence token, mean number
    of denoise steps a block).
    """
    examples = [encoder(problem) for problem in held_out_set(per_task)]
    answers, steps = answer([example.prompt for example in examples])
    right: dict[str, list[bool]] = defaultdict(list)
    for example, tokens in zip(examples, answers, strict=True):
        right[example.problem.task].append(tokens == example.answer[:-1])
    rates = {task: sum(hits) / len(hits) for task, hits in right.items()}
    overall = sum(map(sum, right.values())) / len(examples)
    for task, rate in rates.items():
        print(f"{task:<10}{100 * rate:6.1f} % of {per_task} held-out problems")
    print(f"{'all':<10}{100 * overall:6.1f} %   {steps:.2f} steps per block")
    record = facts | {"exact_match": rates, "overall": overall, "steps_per_block": steps}
    (path / "training.json").write_text(json.dumps(record, indent=2) + "\n")
