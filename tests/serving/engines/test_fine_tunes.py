"""Checkpoints as fine-tuning leaves them: the tokens of the same weights, plainly saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.engines.test_lora import CANVAS, MODELS, OPTIONS, Model, prompt
from tests.support import reference_gemma, reference_llada2, reference_sdar
from tests.support.engine import engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Tensors = dict[str, torch.Tensor]
WITHOUT_LORA = {name: OPTIONS[name] for name in ("block_size",)}
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
    tensors = load_file(path / "model.safetensors")
    head = tensors[EMBEDDINGS[family]].flip(1).clone()
    save(path, tensors | {"lm_head.weight": head})


def with_more_rows(path: Path, family: str) -> None:
    """A vocabulary that was padded, or to which tokens were added."""
    tensors = load_file(path / "model.safetensors")
    table = tensors[EMBEDDINGS[family]]
    new = torch.zeros(MORE_ROWS, table.shape[1])
    tensors[EMBEDDINGS[family]] = torch.cat([table, new])
    save(path, tensors)

    def resize(stated: dict[str, Any]) -> None:
        text = stated.get("text_config", stated)
        text["vocab_size"] += MORE_ROWS

    edit(path / "config.json", resize)


def with_code(path: Path, family: str) -> None:
    """Python files of the authors, which must not be executed; others are missing."""
    code = "raise SystemExit('the code of the repository was executed')\n"
    (path / "configuration_theirs.py").write_text(code)
    (path / "modeling_theirs.py").write_text(code)

    def map_to(*names: str) -> Callable[[dict[str, Any]], object]:
        classes = {
            name: f"{module}.Theirs" for name, module in zip(names[::2], names[1::2], strict=True)
        }
        return lambda stated: stated.update(auto_map=classes)

    config = ("AutoConfig", "configuration_theirs", "AutoModelForCausalLM", "modeling_theirs")
    edit(path / "config.json", map_to(*config, "AutoModel", "modeling_missing"))


CHANGES = {
    "shards": as_wrapped_shards,
    "a head": with_its_head,
    "another head": with_another_head,
    "more rows": with_more_rows,
    "code": with_code,
}
QUICK = {("sdar", "shards"), ("sdar", "another head")}


@pytest.fixture(scope="module", params=["llada2", "sdar", "gemma"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / request.param
    MAKE[request.param](path)
    return path


def all_cases() -> list[Any]:
    return [
        pytest.param(
            family,
            change,
            marks=[] if (family, change) in QUICK else pytest.mark.long,
            id=f"{family}, {change}",
        )
        for family in MAKE
        for change in CHANGES
    ]


@pytest.mark.parametrize(("base", "change"), all_cases(), indirect=["base"])
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
    with engine(path, CANVAS, **(WITHOUT_LORA | model.options | options)) as running:
        got = running.generate([prompt(n) for n in wanted], [model.params(n) for n in wanted])
        assert [tokens for tokens, _ in got] == list(wanted.values())
