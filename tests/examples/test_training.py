"""How the tiny models are made: problems, tokens, losses, and seeds."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from examples.tiny.llada2 import LLaDA2, Shape, load, save
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.training import Encoder, training_examples
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
