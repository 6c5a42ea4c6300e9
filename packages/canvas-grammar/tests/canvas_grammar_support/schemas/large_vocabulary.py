"""A vocabulary as large as those of published models, the same on every machine.

Its tokens are pieces of JSON and prose, cut from the texts of JSON Schema's own test suite with and
without spaces. As in a real byte-level vocabulary, some begin or end inside a character.
"""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from importlib import util
from pathlib import Path

import numpy as np
from canvas_grammar.automaton.vocabulary import Vocabulary

from canvas_grammar_support.schemas.corpora import suite_files

IDS = 151_936  # Qwen's and many others'
WITHOUT_BYTES = 293  # special tokens and padding, after all others
LONGEST = 12
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]{1,3}|[^A-Za-z0-9\s]+|\s+")


@cache
def large() -> Vocabulary:
    """151,936 ids; the last two end a text."""
    written = b"".join(
        json.dumps(content, separators=style, ensure_ascii=ascii).encode(errors="replace")
        for path, content in sorted(suite_files().items())
        for style, ascii in ((None, False), ((",", ":"), True))
    )
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    found |= dict.fromkeys(piece for piece in WORD.findall(written) if len(piece) <= 32)
    rng = np.random.RandomState(0)  # the same numbers in every version of numpy
    wanted = IDS - WITHOUT_BYTES
    while len(found) < wanted:
        begins = rng.randint(len(written) - LONGEST, size=4096).tolist()
        sizes = rng.randint(2, LONGEST + 1, size=4096).tolist()
        found |= dict.fromkeys(written[a : a + n] for a, n in zip(begins, sizes, strict=True))
    tokens = [*list(found)[:wanted], *([b""] * WITHOUT_BYTES)]
    return Vocabulary.from_tokens(tokens, [IDS - 2, IDS - 1])


@cache
def published() -> Vocabulary:
    """A real byte-level vocabulary of about 150,000 ids; `large` where its package is absent.

    `large` is harder than any real one: its tokens are cut from JSON anywhere, so there are thirty
    times as many kinds of them.
    """
    package = util.find_spec("mistral_common")
    path = Path(package.origin or "").parent / "data" / "tekken_240911.json" if package else Path()
    if not path.is_file():
        return large()
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    return Vocabulary.from_tokens([*tokens, b""], [len(tokens)])
