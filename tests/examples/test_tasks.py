"""The problems: right answers, a split that cannot leak, tokens as the server makes them."""

from __future__ import annotations

import ast
import itertools
import operator
from typing import Any

import pytest

from examples.tiny.tasks import TASKS, Problem, held_out, held_out_set, problems
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, training_examples

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def value(node: ast.AST) -> int:
    if isinstance(node, ast.Expression):
        return value(node.body)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant)
    return node.value


def solve(prompt: str) -> str:
    """Every task once more, without the code that wrote it."""
    verb, _, rest = prompt.partition(" ")
    if verb == "copy":
        return rest
    if verb == "count":
        _, first, _, last = rest.split()
        return " ".join(str(n) for n in range(int(first), int(last) + 1))
    if verb in ("sort", "reverse"):
        words = rest.split()
        return " ".join(sorted(words) if verb == "sort" else list(reversed(words)))
    return str(value(ast.parse(prompt, mode="eval")))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("test", [False, True])
def test_answers_and_split(task: str, test: bool) -> None:
    for problem in itertools.islice(problems(task, 3, test=test), 300):
        assert problem.answer == solve(problem.prompt), problem
        assert held_out(problem.prompt) == test


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
