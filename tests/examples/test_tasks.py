"""The problems: a split that cannot leak, and tokens as the server makes them."""

from __future__ import annotations

import itertools

import pytest

from examples.tiny.tasks import Problem, held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, training_examples


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
