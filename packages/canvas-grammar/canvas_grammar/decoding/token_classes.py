"""Lay out the tokens of each class of a constraint.

A class may hold almost the whole vocabulary, but most hold a few tokens. So the tokens of each
class are laid out in chunks of equal size. A reduction over each chunk does most of the work, and a
small one then combines the chunks of each class.

A class that holds most of the vocabulary is called *wide*; usually it is that of ordinary text
inside a string. If the token that would be chosen without a constraint is in it, the class' weight
follows from that of the whole row and those of all other tokens, so a CPU need not read it. Tokens
of no class are laid out as class C, and are read for that reason alone.
"""

from __future__ import annotations

import numpy as np

from canvas_grammar.automaton.pushdown import NO_CLASS
from canvas_grammar.decoding.tables import Column, Tables

CHUNK = 64


def class_tables(class_of_token: np.ndarray, classes: int) -> Tables:
    """Make the tables of a constraint's classes, on the host.

    Tokens ascend within a class. The last chunk of a class is padded with copies of the class' last
    token. Only the chunks of classes count as CHUNKS; those of no class come after them.

    Args:
        class_of_token: int ``[ids]``, the class of each token, or `NO_CLASS`.
        classes: C. The last class is the one that ends a text.
    """
    kind_of = np.where(class_of_token == NO_CLASS, classes, class_of_token).astype(np.int64)
    size = np.bincount(kind_of, minlength=classes + 1)
    wide = int(size.argmax())
    if wide == classes or 2 * size[wide] <= size.sum():
        wide = -1
    count = -(-size // CHUNK)
    first = count.cumsum() - count
    chunk_class = np.arange(classes + 1).repeat(count)
    within = np.arange(len(chunk_class)) - first[chunk_class]
    index = within[:, None] * CHUNK + np.arange(CHUNK)
    last = size[chunk_class][:, None] - 1
    first_place = (size.cumsum() - size)[chunk_class][:, None]
    by_class = np.argsort(kind_of, kind="stable")
    return Tables.of(
        {
            Column.TOKEN: by_class[first_place + np.minimum(index, last)],
            Column.REAL: (index <= last).sum(1),
            Column.FIRST_CHUNK: first,
            Column.END_CHUNK: first + count,
            Column.CLASS_OF_TOKEN: kind_of,
        },
        {
            Column.CLASSES: classes,
            Column.CHUNKS: int(first[classes]),
            Column.IDS: len(kind_of),
            Column.WIDE: wide,
            Column.END_TOKEN: int((kind_of == classes - 1).argmax()),
        },
    )
