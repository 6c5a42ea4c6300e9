"""LoRA: each request its adapter's tokens, which are those of merged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import (
    reference_diffcoder,
    reference_gemma,
    reference_llada2,
    reference_sdar,
)
from tests.support.adapters import RANK, adapter, merged, write
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine, greedy
from tests.support.reference import MARGIN, Reference, Rule

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = 32
BLOCK, CANVAS, COUNT = 16, 32, 40
LENGTHS = (3, 34, 64, 100)
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "block_size": PAGE,
}
PREFIX = "base_model.model."
LAYER = "model.layers.1"


@dataclass(frozen=True)
class Model:
    """A model that takes adapters.

    Attributes:
        make: writes a random checkpoint.
        answers: the tokens that its reference makes of each prompt, by the prompt's index; prompts
            with near ties are left out.
        params: sampling parameters of the prompt with this index.
        refused: modules that take no adapter, and what the message says.
        extra: more modules that the second adapter has, see `adapter`.
    """

    make: Callable[[Path], Any]
    answers: Callable[[Path], dict[int, list[int]]]
    params: Callable[[int], Any]
    refused: dict[str, str]
    options: dict[str, Any]
    extra: str = ""


def prompt(n: int) -> list[int]:
    return [12 + (37 * i * i + 11 * i + n) % 200 for i in range(1, LENGTHS[n] + 1)]


def by(read: Callable[[Path], Reference], rule: Rule) -> Callable[[Path], dict[int, list[int]]]:
    """Answers of a reference by a rule."""

    def answers(path: Path) -> dict[int, list[int]]:
        reference = read(path)
        found = {n: reference.generate(prompt(n), COUNT, rule) for n in range(len(LENGTHS))}
        return {n: answer.tokens for n, answer in found.items() if answer.margin > MARGIN}

    return answers


def gemma_answers(path: Path) -> dict[int, list[int]]:
    reference = reference_gemma.Reference(path, "symmetric")
    cold = reference_gemma.COLD
    return {
        n: reference.generate(prompt(n), n, 2, max_denoising_steps=4, **cold)
        for n in range(len(LENGTHS))
    }


def gemma_params(n: int) -> Any:
    options = {"seed": n, "ignore_eos": True, "diffusion_max_steps": 4}
    return greedy(2 * CANVAS, **options)


ABSENT = {"model.layers.9.mlp.gate_proj": "no layer", "language_model.layers.0.x": "no layer"}
MODELS = {
    "llada2": Model(
        lambda path: reference_llada2.random_checkpoint(path, 0),
        by(lambda path: reference_llada2.Reference.load(path, BLOCK, 299), Rule(threshold=0.6)),
        lambda n: greedy(COUNT, ignore_eos=True, diffusion_threshold=0.6),
        {
            f"{LAYER}.mlp.experts.3.up_proj": "experts",
            f"{LAYER}.mlp.gate": "no layer",
            "lm_head": "no layer",
            "model.word_embeddings": "no layer",
            **ABSENT,
        },
        {"diffusion_config": {"canvas_length": BLOCK}},
    ),
    "sdar": Model(
        lambda path: reference_sdar.random_checkpoint(path, experts=True, block=4),
        by(reference_sdar.Reference, reference_sdar.Rule()),
        lambda n: greedy(COUNT, ignore_eos=True, **reference_sdar.Rule().options()),
        {f"{LAYER}.mlp.experts.3.up_proj": "experts", f"{LAYER}.mlp.gate": "no layer", **ABSENT},
        {"diffusion_config": None},
    ),
    "gemma": Model(
        lambda path: reference_gemma.random_checkpoint(path, 1, CANVAS, sliding_window=48),
        gemma_answers,
        gemma_params,
        {
            # What PEFT calls the two tensors with all experts.
            "model.decoder.layers.1.experts.base_layer": "experts",
            "model.decoder.layers.1.experts": "experts",
            "model.decoder.layers.1.router.proj": "no layer",
            "model.decoder.self_conditioning.up_proj": "no layer",
            "model.decoder.embed_tokens": "no layer",
            "model.encoder.vision_tower.encoder.layers.0.self_attn.q_proj": "no layer",
            "model.decoder.layers.9.mlp.gate_proj": "no layer",
        },
        TEXT_ONLY_OPTIONS,
    ),
}


# Blocks without experts, whose commits share a pass with the next block.
DENSE = Model(
    lambda path: reference_sdar.random_checkpoint(path, experts=False, block=4),
    by(reference_sdar.Reference, reference_sdar.Rule()),
    lambda n: greedy(COUNT, ignore_eos=True),
    {"lm_head": ""},  # vLLM would look up an adapter for each request, which has several rows
    {
        "diffusion_config": None,
        "async_scheduling": True,
        "additional_config": {"dllm": {"fused_commit": "on"}},
    },
    "embed_tokens",
)
MODELS |= {
    "sdar-dense": DENSE,
    # One place for two adapters, which take turns; chunks of prompts.
    "sdar-in-turn": replace(
        DENSE,
        options={
            "diffusion_config": None,
            "max_loras": 1,
            "max_cpu_loras": 2,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
        },
    ),
    "diffcoder": replace(
        DENSE,
        make=reference_diffcoder.random_checkpoint,
        answers=by(reference_diffcoder.Reference, reference_diffcoder.Rule()),
        refused={},
        options={"diffusion_config": None},
        extra="",
    ),
}


@dataclass(frozen=True)
class Case:
    """A model that serves: with no adapter (0) or one of two, and their references' answers."""

    model: Model
    folder: Path
    adapters: list[Any]
    wanted: list[dict[int, list[int]]]
    running: Engine

    def ask(self, asked: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
        """Tokens of each (adapter, prompt), and how many of its prompt came out of the cache."""
        outputs = self.running.llm.generate(
            [{"prompt_token_ids": prompt(n)} for _, n in asked],
            [self.model.params(n) for _, n in asked],
            lora_request=[self.adapters[number] for number, _ in asked],
            use_tqdm=False,
        )
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


QUICK = ("llada2", "gemma", "sdar-dense")


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm.lora.request import LoRARequest

    model, folder = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    model.make(folder / "base")
    adapters, wanted = [None], [model.answers(folder / "base")]
    for n in (1, 2):
        extra = model.extra if n == 2 else ""
        path = adapter(folder / "base", folder / f"adapter{n}", n, extra)
        wanted.append(model.answers(merged(folder / "base", path, folder / f"merged{n}")))
        adapters.append(LoRARequest(f"a{n}", n, str(path)))
    if request.param == "gemma":
        renamed = {
            name.replace("model.decoder.", "model.encoder.language_model."): tensor
            for name, tensor in load_file(path / "adapter_model.safetensors").items()
        }
        write(path, renamed)
    with engine(folder / "base", CANVAS, **(OPTIONS | model.options)) as running:
        yield Case(model, folder, adapters, wanted, running)


def test_every_request_its_adapter(case: Case) -> None:
    """One model after another, then all in one batch and out of the cache; nobody shares pages."""
    assert all(len(answers) >= len(LENGTHS) - 1 for answers in case.wanted)
    assert len({str(answers[0]) for answers in case.wanted}) == 3
    robust = [[(number, n) for n in answers] for number, answers in enumerate(case.wanted)]
    for asked in robust:
        found = case.ask(asked)
        assert [tokens for tokens, _ in found] == [case.wanted[number][n] for number, n in asked]
        assert not any(cached for _, cached in found)
    mixed = sorted((one for asked in robust for one in asked), key=lambda one: one[::-1])
    for asked in (mixed, mixed[::-1]):
        found = case.ask(asked)
        assert [tokens for tokens, _ in found] == [case.wanted[number][n] for number, n in asked]
        assert [cached for _, cached in found] == [
            (LENGTHS[n] - 1) // PAGE * PAGE for _, n in asked
        ]
    case.running.assert_idle()


def test_what_takes_no_adapter_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    llm = case.running.llm.llm_engine
    good = load_file(Path(case.adapters[1].path) / "adapter_model.safetensors")
    for n, (module, reason) in enumerate(case.model.refused.items()):
        more = {f"{PREFIX}{module}.lora_{part}.weight": torch.zeros(RANK, RANK) for part in "AB"}
        path = tmp_path / f"{n}"
        path.mkdir()
        write(path, good | more)
        with pytest.raises(ValueError, match=f"'{module}'.* {reason}"):
            llm.add_lora(LoRARequest(f"bad{n}", 10 + n, str(path)))
    assert case.ask([(1, 1)])[0][0] == case.wanted[1][1]


@pytest.mark.parametrize("case", ["gemma"], indirect=True)
def test_an_adapter_of_both_halves_is_refused(case: Case, tmp_path: Path) -> None:
    """One layer here has the weights of both, and each of the adapters would be half the truth."""
    from vllm.lora.request import LoRARequest

    both = {}
    for one in case.adapters[1:]:
        both |= load_file(Path(one.path) / "adapter_model.safetensors")
    write(tmp_path, both)
    with pytest.raises(ValueError, match=r"'model\.(de|en)coder.* and 'model\.(de|en)coder"):
        case.running.llm.llm_engine.add_lora(LoRARequest("both", 9, str(tmp_path)))
