"""The bytes that each token of a tokenizer stands for.

They are read from a ``tokenizer.json`` of Hugging Face's `tokenizers`: byte-level vocabularies (in
GPT-2's alphabet) and vocabularies of text with byte fallback (SentencePiece's). Other decoders are
refused, because a single wrong byte would produce wrong outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from canvas_grammar.grammar.marks import OTHER
from canvas_grammar.limits import ConstraintError

# Marks (see `grammar.marks`) begin with this byte, which UTF-8 does not use. Their number follows.
MARK_BYTE = 0xF8
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id. Tokens without bytes never occur in a constrained text.

    Attributes:
        data: uint8 ``[bytes]``, the bytes of all tokens, one after the other.
        offsets: int64 ``[ids + 1]``, where the bytes of each token begin in `data`.
        ends: ids that end a text, ascending. They have no bytes.
        added: from the texts of special and added tokens that may be written to their ids.
        special: the texts of special tokens.
    """

    data: np.ndarray
    offsets: np.ndarray
    ends: tuple[int, ...]
    added: Mapping[str, int] = field(default_factory=dict)
    special: tuple[str, ...] = ()

    @classmethod
    def from_tokens(cls, tokens: Sequence[bytes], ends: Iterable[int]) -> Vocabulary:
        """Make a vocabulary from the bytes of each id, and at least one id that ends a text."""
        end_ids = tuple(sorted(set(ends)))
        if not end_ids:
            raise ConstraintError("no token ends a text, so none could be finished")
        if not 0 <= end_ids[0] <= end_ids[-1] < len(tokens):
            raise ConstraintError(f"ids {end_ids} that end a text are not all in the vocabulary")
        texts = list(tokens)
        for end in end_ids:
            texts[end] = b""
        lengths: np.ndarray = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        return cls(np.frombuffer(b"".join(texts), dtype=np.uint8), offsets, end_ids)

    @classmethod
    def read(
        cls,
        document: str | Mapping[str, Any],
        size: int,
        ends: Iterable[int],
        unwritten: Collection[int] = (),
    ) -> Vocabulary:
        """Make a vocabulary from a ``tokenizer.json``.

        Args:
            document: the text of the file, or its parsed content.
            size: number of ids of the model's head. Ids that the tokenizer does not know have no
                bytes.
            ends: ids that end a text.
            unwritten: ids of other tokens that no text contains: padding, masks, images.

        Raises:
            ConstraintError: an unsupported decoder, or no usable end.
        """
        content = json.loads(document) if isinstance(document, str) else document
        write = _writer(content.get("decoder"))
        tokens = [b""] * size
        for token, number in _entries(content):
            if number < size:
                tokens[number] = write(token)
        # Only marks may stand for their bytes, which no text contains.
        tokens = [b"" if MARK_BYTE in token else token for token in tokens]
        found = [added for added in content.get("added_tokens", ()) if added["id"] < size]
        for added in found:
            special = added["special"]
            tokens[added["id"]] = _mark(OTHER) if special else write(added["content"])
        for number in filter(size.__gt__, unwritten):
            tokens[number] = b""
        known = cls.from_tokens(tokens, ends)
        named = {added["content"]: added["id"] for added in found if known.text(added["id"])}
        return replace(
            known,
            added={text: number for text, number in named.items() if not text.isspace()},
            special=tuple(added["content"] for added in found if added["special"]),
        )

    def with_marks(self, numbers: Mapping[int, int]) -> Vocabulary:
        """The same vocabulary in which tokens, by id, are marks with these numbers."""
        tokens = np.array(sorted(numbers), dtype=np.int64)
        begin, end = self.offsets[tokens], self.offsets[tokens + 1]
        texts = np.split(self.data, np.stack([begin, end], 1).reshape(-1))
        texts[1::2] = [np.frombuffer(_mark(numbers[token]), np.uint8) for token in tokens.tolist()]
        longer: np.ndarray = np.zeros(len(self.offsets), dtype=np.int64)
        longer[tokens + 1] = len(_mark(OTHER)) - (end - begin)
        return replace(self, data=np.concatenate(texts), offsets=self.offsets + longer.cumsum())

    def text(self, token: int) -> bytes:
        """The bytes of a token."""
        return self.data[self.offsets[token] : self.offsets[token + 1]].tobytes()

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _mark(number: int) -> bytes:
    return bytes([MARK_BYTE, number])


def _entries(content: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    entries = content["model"]["vocab"]
    if isinstance(entries, Mapping):
        return entries.items()
    return [(pair[0], number) for number, pair in enumerate(entries)]  # Unigram: (text, score)


def _writer(decoder: Mapping[str, Any] | None) -> Any:
    """A function that maps a token, as the vocabulary spells it, to its bytes."""
    parts = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        parts = decoder["decoders"]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    supported = {"Replace", "ByteFallback", "Fuse"}
    if not kinds or set(kinds) - supported or "ByteFallback" not in kinds:
        raise ConstraintError(
            f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported: ByteLevel, "
            "or Replace, ByteFallback and Fuse are"
        )
    replaced = [
        (part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"
    ]

    def fallback(token: str) -> bytes:
        if byte_token := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte_token[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode(errors="surrogatepass")

    return fallback


def _byte_level(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet; a token not in that alphabet is plain text."""
    alphabet = byte_level_alphabet()
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode(errors="surrogatepass")


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(unprintable)}
