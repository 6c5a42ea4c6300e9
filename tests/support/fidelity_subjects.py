"""The models whose fidelity is measured: prompts, and what their float32 references answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder
from tests.support import reference_gemma, reference_llada2
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.engine import Engine, greedy
from tests.support.fidelity import Head, LayerError, recorded
from tests.support.published import llada2_config
from tests.support.reference import Rule

# LLaDA2.0-mini's published widths, with two of its twenty layers: a dense one and one of experts.
MINI_SLICE = llada2_config("llada2-mini") | {"num_hidden_layers": 2, "dtype": "float32"}
BLOCK = 32


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and what its float32 reference computes.

    Attributes:
        answers: token ids that the reference answers to each of the `prompts`.
        margins: for each answer how close its closest decision was; None where the reference does
            not say.
        tokens: the tokens of one forward pass, whole blocks.
        layers: the output ``[tokens, hidden]`` of every layer for `tokens`.
        head: the reference's head, with the norm before it.
        params: from the number of a prompt to its sampling parameters.
        options: options of the engine.
    """

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    margins: list[float] | None
    tokens: list[int]
    layers: list[torch.Tensor]
    head: Head
    params: Callable[[int], Any]
    options: dict[str, Any] = field(default_factory=dict)


def errors(subject: Subject, running: Engine) -> list[LayerError]:
    """The error of every layer of an engine that serves the subject."""
    with recorded(running.runner.model.model.layers) as passes:
        running.generate([subject.tokens], [subject.params(0)])
    pairs = zip(passes[0], subject.layers, strict=True)
    return [LayerError.of(ours, theirs, subject.head) for ours, theirs in pairs]


def answers(subject: Subject, running: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """What an engine answers to every prompt alone, and to all prompts at once."""
    params = [subject.params(n) for n in range(len(subject.prompts))]
    batched = [tokens for tokens, _ in running.generate(subject.prompts, params)]
    pairs = zip(subject.prompts, params, strict=True)
    alone = [running.generate([prompt], [one])[0][0] for prompt, one in pairs]
    return alone, batched


def _random_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(12, vocabulary, (count,), generator=generator).tolist()


def _asked(tokenizer: Any, per_task: int) -> list[list[int]]:
    encoder = Encoder(tokenizer)
    return [encoder(problem).prompt for problem in held_out_set(per_task)]


def tiny_llada2(per_task: int) -> Subject:
    tokenizer = llada2_tokenizer()
    reference = reference_llada2.Reference.load(TINY_LLADA2, BLOCK, tokenizer.mask_token_id)
    prompts = _asked(tokenizer, per_task)
    tokens = _random_tokens(2 * BLOCK, 250)
    with torch.no_grad():
        rule, ends = Rule(threshold=0.9), (tokenizer.eos_token_id,)
        answers = [reference.generate(prompt, 64, rule, ends) for prompt in prompts]
        layers = reference.hidden_states(tokens)
    return Subject(
        TINY_LLADA2,
        prompts,
        [answer.tokens for answer in answers],
        [answer.margin for answer in answers],
        tokens,
        layers,
        reference.head,
        lambda _: greedy(64, diffusion_threshold=0.9),
    )


def mini_slice(path: Path, prompts: int = 10) -> Subject:
    """Two layers of LLaDA2.0-mini at its published widths with random weights, written to `path`.

    An answer is the rest of a block after 24 prompt tokens, decided one token at a time.
    """
    config = reference_llada2.random_checkpoint(path, 0, **MINI_SLICE)
    mask, left = config["mask_token_id"], 8
    reference = reference_llada2.Reference.load(path, BLOCK, mask)
    asked = [
        _random_tokens(BLOCK * (1 + n % 2) + BLOCK - left, mask, seed=n) for n in range(prompts)
    ]
    tokens = _random_tokens(2 * BLOCK, mask, seed=prompts)
    with torch.no_grad():
        answers = [reference.generate(prompt, left, Rule(threshold=1.01)) for prompt in asked]
        layers = reference.hidden_states(tokens)
    head = ("lm_head.weight", "model.norm.weight")
    reference.weights = {name: reference.weights[name] for name in head}
    return Subject(
        path,
        asked,
        [answer.tokens for answer in answers],
        [answer.margin for answer in answers],
        tokens,
        layers,
        reference.head,
        lambda _: greedy(left, diffusion_threshold=1.01, ignore_eos=True),
    )


def tiny_gemma(per_task: int) -> Subject:
    """The trained checkpoint of this repository. An answer is the first canvas."""
    from vllm import SamplingParams

    reference = reference_gemma.Reference(TINY_GEMMA, "symmetric")
    model = reference.model
    encoder = model.model.encoder
    cap = model.config.text_config.final_logit_softcapping
    prompts = _asked(gemma_processor().tokenizer, per_task)
    tokens = _random_tokens(2 * reference.canvas, 250)
    with torch.no_grad():
        with recorded(encoder.language_model.layers) as passes:
            encoder(input_ids=torch.tensor([tokens]))
        answers = [
            reference.generate(prompt, n, 1, **reference_gemma.COLD)
            for n, prompt in enumerate(prompts)
        ]

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(model.lm_head(encoder.language_model.norm(hidden)) / cap)

    return Subject(
        TINY_GEMMA,
        prompts,
        answers,
        None,
        tokens,
        passes[0],
        head,
        lambda n: SamplingParams(
            temperature=0, seed=n, max_tokens=reference.canvas, ignore_eos=True
        ),
        TEXT_ONLY_OPTIONS,
    )
