"""What tokens write: the tokenizer's own decoder must agree."""

from __future__ import annotations

import json

import numpy as np
import pytest
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.checkout import TINY
from canvas_grammar_support.helpers import text_of, token_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.models import BPE


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "ab", "Ġthe", "Ċ", "Ã©", "é", "ÃĤ"]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(dict.fromkeys(words))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.add_tokens(["<think>", "two words", "日本"])
    return tokenizer


def with_fallback() -> Tokenizer:
    words = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁the", "▁", "a", "▁▁▁", "é", "日本"]
    model = BPE(
        {word: n for n, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    tokenizer.add_tokens(["\n\n", "<code>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_bytes_are_what_the_tokenizer_decodes(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    end = tokenizer.token_to_id("<eos>")
    size = tokenizer.get_vocab_size() + 5
    known = Vocabulary.read(tokenizer.to_str(), size, [end])
    assert len(known) == size
    assert token_bytes(known, size - 1) == b""
    rng = np.random.default_rng(0)
    usable = [n for n in range(size) if token_bytes(known, n)]
    whole = [n for n in usable if is_text(token_bytes(known, n))]
    assert len(usable) >= 256
    for _ in range(300):
        ids = rng.choice(whole, size=6).tolist()
        if rng.random() < 0.5:  # a character in pieces
            by_bytes = {token_bytes(known, n): n for n in usable}
            ids[2:2] = [by_bytes[bytes([byte])] for byte in "日é".encode()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text_of(known, ids).decode(), ids
    special = [n for n in range(size) if not token_bytes(known, n)]
    assert end in special and tokenizer.decode([end], skip_special_tokens=True) == ""
    alone = [n for n in special if n < size - 5 and n != end]
    assert {tokenizer.decode([n], skip_special_tokens=True) for n in alone} <= {"", "\ufffd"}
    assert len(alone) <= 2, "<unk>, and the byte that marks begin with"


def is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", ["tiny-llada2", "tiny-diffusiongemma"])
def test_the_tiny_checkpoints(name: str) -> None:
    path = TINY / name / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    known = Vocabulary.read(json.loads(path.read_text(encoding="utf-8")), 300, [257])
    text = 'naïve "日本" {"a": [1]}\n\t\x07'
    ids = tokenizer.encode(text).ids
    assert text_of(known, ids) == text.encode()
    assert text_of(known, [*ids, 257, *ids]) == text.encode(), "nothing after an end"


@pytest.mark.parametrize(
    ("decoder", "kinds"),
    [
        (None, "none"),
        ({"type": "WordPiece"}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "Strip"}]}, "Strip"),
    ],
)
def test_other_decoders_are_refused(decoder: object, kinds: str) -> None:
    document = {"decoder": decoder, "model": {"vocab": {}}, "added_tokens": []}
    with pytest.raises(ConstraintError, match=f"decoder .*{kinds}.* is not supported"):
        Vocabulary.read(document, 3, [0])


def test_ends() -> None:
    with pytest.raises(ConstraintError, match="no token ends a text"):
        Vocabulary.from_tokens([b"a"], [])
    with pytest.raises(ConstraintError, match="not all in the vocabulary"):
        Vocabulary.from_tokens([b"a"], [1])
    known = Vocabulary.from_tokens([b"a", b"b"], [1, 1])
    assert known.ends == (1,)
    assert token_bytes(known, 1) == b"", "an end writes nothing"
