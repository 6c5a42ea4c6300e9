"""An answer does not begin with its prompt's text where that ends in U+FFFD."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tests.support.checkpoints import TINY
from vllm_dllm.vllm_seams.outputs import StreamAfterPrompt

TOKENIZER = Tokenizer.from_file(str(TINY / "tiny-llada2" / "tokenizer.json"))


def decoded(prompt: list[int], answer: list[int]) -> str:
    text = TOKENIZER.decode(prompt, skip_special_tokens=True)
    stream = StreamAfterPrompt(DecodeStream(ids=prompt, skip_special_tokens=True), text)
    return "".join(stream.step(TOKENIZER, token) or "" for token in answer)


@pytest.mark.parametrize("prompt", ["ab\ufffd", "\ufffd", "\ufffd\ufffd", "aba\ufffd"])
def test_the_answer_alone(prompt: str) -> None:
    answer = TOKENIZER.encode("aba \ufffd c", add_special_tokens=False).ids
    assert decoded(TOKENIZER.encode(prompt).ids, answer) == "aba \ufffd c"


def test_an_answer_may_complete_the_prompts_last_character() -> None:
    ids = TOKENIZER.encode("ab€c", add_special_tokens=False).ids
    assert len(ids) == 6, "the euro sign has three bytes, and so three tokens"
    assert decoded(ids[:4], ids[4:]) == "€c"


@pytest.mark.engine
def test_an_engine_answers_without_the_prompt() -> None:
    from tests.support.engine import engine, greedy

    with engine(TINY / "tiny-llada2", 32) as running:
        (given,) = running.llm.generate(["copy ab\ufffd"], [greedy(8)], use_tqdm=False)
        answer = given.outputs[0]
        tokenizer = running.llm.get_tokenizer()
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
