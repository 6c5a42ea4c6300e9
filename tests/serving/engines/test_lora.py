"""Fine-tuned models: each request its adapter's tokens, which are those of merged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.support import (
    reference_diffcoder,
    reference_dream,
    reference_gemma,
    reference_llada2,
    reference_nemotron,
    reference_openpangu,
    reference_sdar,
    reference_vision,
)
from tests.support.adapters import RANK, adapter, merged, write
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine, greedy
from tests.support.families import FUSED
from tests.support.long import long_but
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
        lambda n: greedy(2 * CANVAS, seed=n, ignore_eos=True, diffusion_max_steps=4),
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
    {"diffusion_config": None} | FUSED,
    "embed_tokens",
)
# One place for two adapters, which take turns; chunks of prompts.
IN_TURN = {"max_loras": 1, "max_cpu_loras": 2, "max_num_batched_tokens": 64, "max_num_seqs": 4}
MODELS |= {
    "sdar-dense": DENSE,
    "sdar-in-turn": replace(DENSE, options={"diffusion_config": None} | IN_TURN),
    "diffcoder": Model(
        reference_diffcoder.random_checkpoint,
        by(reference_diffcoder.Reference, reference_diffcoder.Rule()),
        DENSE.params,
        {},
        {"diffusion_config": None},
    ),
    "dream": replace(
        DENSE,
        make=lambda path: reference_dream.random_checkpoint(path, 8),
        answers=by(reference_dream.Reference, reference_dream.Rule()),
    ),
    "openpangu": Model(
        lambda path: reference_openpangu.random_checkpoint(path, 8),
        by(reference_openpangu.Reference, reference_openpangu.Rule()),
        DENSE.params,
        ABSENT,
        {"diffusion_config": None},
    ),
    "sdar-vl": Model(
        lambda path: reference_vision.sdar_checkpoint(path, block=4),
        by(reference_vision.Sdar, reference_sdar.Rule()),
        DENSE.params,
        {"vision_tower.vision_model.encoder.layers.0.self_attn.q_proj": "no layer"},
        {"diffusion_config": None},
    ),
    "nemotron-vlm": Model(
        lambda path: reference_vision.nemotron_checkpoint(path, block=4),
        by(reference_vision.Nemotron, reference_nemotron.Rule()),
        DENSE.params,
        {"encoder.vision_tower.transformer.layers.0.attention.q_proj": "no layer"},
        {"diffusion_config": None},
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


@pytest.fixture(scope="module", params=long_but(QUICK, MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
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
    both = {}
    for one in case.adapters[1:]:
        both |= load_file(Path(one.path) / "adapter_model.safetensors")
    write(tmp_path, both)
    with pytest.raises(ValueError, match=r"'model\.(de|en)coder.* and 'model\.(de|en)coder"):
        case.running.llm.llm_engine.add_lora(LoRARequest("both", 9, str(tmp_path)))


# ---- Checkpoints as fine-tuning leaves them: the tokens of the same weights, plainly saved

Tensors = dict[str, torch.Tensor]
# As fine-tunes have them; every family with a head that is tied to the embedding.
MAKE: dict[str, Callable[[Path], Any]] = {
    "llada2": lambda path: reference_llada2.random_checkpoint(path, 0, tie_word_embeddings=True),
    "sdar": lambda path: reference_sdar.random_checkpoint(path, experts=False, block=4, tied=True),
    "gemma": MODELS["gemma"].make,
}
EMBEDDINGS = {
    "llada2": "model.word_embeddings.weight",
    "sdar": "model.embed_tokens.weight",
    "gemma": "model.decoder.embed_tokens.weight",
}
MORE_ROWS = 16


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))


def save(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def as_wrapped_shards(path: Path, family: str) -> None:
    """Shards of a model that PEFT still wraps, and whose adapter was merged in place."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, files = sorted(tensors), {}
    for n in range(3):
        file = f"model-{n + 1:05}-of-00003.safetensors"
        shard = {}
        for name in names[n::3]:
            wrapped = name.replace("_proj.weight", "_proj.base_layer.weight")
            shard[f"base_model.model.{wrapped}"] = tensors[name]
        save_file(shard, path / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def with_its_head(path: Path, family: str) -> None:
    """A tied head is written out."""
    tensors = load_file(path / "model.safetensors")
    save(path, tensors | {"lm_head.weight": tensors[EMBEDDINGS[family]].clone()})


def with_another_head(path: Path, family: str) -> None:
    """As an adapter of a tied head leaves it; transformers does not tie it, either."""
    with_its_head(path, family)
    tensors = load_file(path / "model.safetensors")
    save(path, tensors | {"lm_head.weight": tensors["lm_head.weight"].flip(1).clone()})


def with_more_rows(path: Path, family: str) -> None:
    """A vocabulary that was padded, or to which tokens were added."""
    tensors = load_file(path / "model.safetensors")
    table = tensors[EMBEDDINGS[family]]
    new = torch.zeros(MORE_ROWS, table.shape[1])
    save(path, tensors | {EMBEDDINGS[family]: torch.cat([table, new])})

    def resize(stated: dict[str, Any]) -> None:
        stated.get("text_config", stated)["vocab_size"] += MORE_ROWS

    edit(path / "config.json", resize)


def with_code(path: Path, family: str) -> None:
    """Python files of the authors, which must not be executed; others are missing."""
    for name in ("configuration", "modeling"):
        code = "raise SystemExit('the code of the repository was executed')\n"
        (path / f"{name}_theirs.py").write_text(code)
    classes = {
        "AutoConfig": "configuration_theirs.Theirs",
        "AutoModelForCausalLM": "modeling_theirs.Theirs",
        "AutoModel": "modeling_missing.Theirs",
    }
    edit(path / "config.json", lambda stated: stated.update(auto_map=classes))


CHANGES = {
    "shards": as_wrapped_shards,
    "a head": with_its_head,
    "another head": with_another_head,
    "more rows": with_more_rows,
    "code": with_code,
}
QUICK_CHANGES = {("sdar", "shards"), ("sdar", "another head")}


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / request.param
    MAKE[request.param](path)
    return path


@pytest.mark.parametrize(
    ("base", "change"), long_but(QUICK_CHANGES, product(MAKE, CHANGES)), indirect=["base"]
)
def test_it_answers_as_its_weights_do(
    base: Path, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = base.name
    model: Model = MODELS[family]
    path = shutil.copytree(base, tmp_path / "tuned")
    CHANGES[change](path, family)
    plain = base if change in ("shards", "a head", "code") else path
    if change == "another head" and family != "gemma":
        plain = shutil.copytree(path, tmp_path / "untied")
        edit(plain / "config.json", lambda stated: stated.update(tie_word_embeddings=False))
    elif change == "more rows":
        monkeypatch.setattr(reference_gemma, "VOCABULARY", reference_gemma.VOCABULARY + MORE_ROWS)
    wanted = model.answers(plain)
    if change == "another head":
        assert wanted != model.answers(base)
    # Of DiffusionGemma transformers has a class itself, which it then leaves aside.
    options = {"trust_remote_code": change == "code" and family != "gemma"}
    with engine(path, CANVAS, **({"block_size": PAGE} | model.options | options)) as running:
        got = running.generate([prompt(n) for n in wanted], [model.params(n) for n in wanted])
        assert [tokens for tokens, _ in got] == list(wanted.values())
