"""How the tiny models are made: problems, tokens, losses, and seeds."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest
import torch

from examples.tiny.llada2 import LLaDA2, Shape, load, save
from examples.tiny.tasks import Problem, held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, training_examples
from tests.support.checkpoints import ROOT
from tests.support.reference_llada2 import Reference


def test_llada2_module_is_the_reference(tmp_path: Path) -> None:
    """The module that trains computes what the tests' own reference computes from its file."""
    torch.manual_seed(0)
    model = LLaDA2(Shape(num_hidden_layers=3))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.expert_bias.normal_(std=0.3)
    tokenizer = llada2_tokenizer()
    save(model, tokenizer, tmp_path)
    reference = Reference.load(tmp_path, 32, tokenizer.mask_token_id)
    ids = torch.randint(0, 272, (50,)).tolist()
    with torch.no_grad():
        got = load(tmp_path)(torch.tensor([ids]))[0]
    torch.testing.assert_close(got, reference.logits(ids), atol=1e-4, rtol=0)


def test_training_never_sees_a_held_out_problem() -> None:
    tested = {problem.prompt for problem in held_out_set(100)}
    seen = itertools.islice(training_examples(Encoder(llada2_tokenizer()), 0), 3000)
    assert not tested & {example.problem.prompt for example in seen}


@pytest.mark.parametrize("family", ["llada2", "gemma"])
def test_tokens_are_those_of_the_chat_template(family: str) -> None:
    tokenizer = llada2_tokenizer() if family == "llada2" else gemma_processor().tokenizer
    example = Encoder(tokenizer)(Problem("add", "3 + 4", "7"))
    message = [{"role": "user", "content": "3 + 4"}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert example.prompt == chat
    assert tokenizer.decode(example.answer) == "7" + tokenizer.eos_token
    # One token a byte: digits stand alone, and no text is unknown.
    assert len(tokenizer.encode("12 é", add_special_tokens=False)) == 5


def test_a_seed_is_a_checkpoint(tmp_path: Path) -> None:
    """Of the demo's."""
    make_twin = runpy.run_path(str(ROOT / "examples" / "tiny" / "make_twin.py"))["make_twin"]
    small = {"hidden": 64, "layers": 2, "vocabulary": 128}
    made = [
        make_twin(tmp_path / name, seed, **small) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    a, b, c = ((path / "model.safetensors").read_bytes() for path in made)
    assert a == b != c
