"""Lay out the tokens of each class, for one constraint and for all canvases of a batch.

A class may hold almost the whole vocabulary, but most hold a few tokens. So the tokens of each
class are laid out in chunks of equal size. A reduction over each chunk does most of the work, and a
small one then combines the chunks of each class.

A class that holds most of the vocabulary is called *wide*; usually it is that of ordinary text
inside a string. If the token that would be chosen without a constraint is in it, the class' weight
follows from that of the whole row and those of all other tokens, so its chunks need not be read.
They are the last ones. Tokens of no class come first. They are laid out only if there is a wide
class, and never read otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from canvas_grammar.automaton.pushdown import NO_CLASS

CHUNK = 64


@dataclass(frozen=True)
class TokenClasses:
    """The classes of one constraint: ``C`` classes in ``T`` chunks of ``CHUNK`` tokens.

    Automata of the same constraint share it, whatever their states are.

    Attributes:
        token: int64 ``[T, CHUNK]``, ids, ascending within a class. The last chunk of a class is
            padded with copies of the class' last token.
        padding: float32 ``[T]``, number of padding entries in each chunk.
        chunk_class: int64 ``[T]``, the class of each chunk; C for tokens of no class.
        first_chunk: int64 ``[C]``, the first chunk of each class.
        behind_chunk: int64 ``[C]``, the chunk after the last one of each class.
        class_of_token: int32 ``[ids]``; C for tokens of no class.
        most_chunks: how many chunks the largest class has, at least 1.
        numbers: int64 ``[3]``: the lowest id that ends a text; C; the wide class, or -1.
        narrow_chunks: how many chunks are not those of the wide class.
    """

    token: torch.Tensor
    padding: torch.Tensor
    chunk_class: torch.Tensor
    first_chunk: torch.Tensor
    behind_chunk: torch.Tensor
    class_of_token: torch.Tensor
    most_chunks: int
    numbers: torch.Tensor
    narrow_chunks: int

    @classmethod
    def from_class_of_token(cls, class_of_token: np.ndarray, classes: int) -> TokenClasses:
        """Make the layout from the class of each token, int ``[ids]``, or `NO_CLASS`; on the host.

        The last class is the one that ends a text.
        """
        kind_of = np.where(class_of_token == NO_CLASS, classes, class_of_token).astype(np.int64)
        size = np.bincount(kind_of, minlength=classes + 1)
        wide = _wide_class(size)
        narrow = np.flatnonzero(np.arange(classes) != wide)
        order = narrow if wide < 0 else np.array([classes, *narrow, wide])
        count = -(-size[order] // CHUNK)
        chunk_class = order.repeat(count)
        behind = np.zeros_like(size)
        behind[order] = count.cumsum()
        first = behind - -(-size // CHUNK)
        within = np.arange(len(chunk_class)) - first[chunk_class]
        index = within[:, None] * CHUNK + np.arange(CHUNK)
        last = size[chunk_class][:, None] - 1
        first_place = (size.cumsum() - size)[chunk_class][:, None]
        by_class = np.argsort(kind_of, kind="stable")
        return cls(
            token=torch.from_numpy(by_class[first_place + np.minimum(index, last)]),
            padding=torch.from_numpy((index > last).sum(1).astype(np.float32)),
            chunk_class=torch.from_numpy(chunk_class),
            first_chunk=torch.from_numpy(first[:classes]),
            behind_chunk=torch.from_numpy(behind[:classes]),
            class_of_token=torch.from_numpy(kind_of.astype(np.int32)),
            most_chunks=max(1, int((behind - first)[:classes].max(initial=0))),
            numbers=torch.from_numpy(np.array([(kind_of == classes - 1).argmax(), classes, wide])),
            narrow_chunks=len(chunk_class) if wide < 0 else int(first[wide]),
        )

    @property
    def classes(self) -> int:
        """C."""
        return len(self.first_chunk)


@dataclass(frozen=True)
class BatchClasses:
    """The classes of each of ``n`` canvases, padded to the largest C and T among them.

    Class C stands for no class.

    Attributes:
        token: int64 ``[n, T, CHUNK]``.
        padding: float32 ``[n, T]``.
        chunk_class: int64 ``[n, T]``; C for padding, and the canvas' own C for tokens of no class.
        first_chunk: int64 ``[n, C + 1]``.
        behind_chunk: int64 ``[n, C + 1]``.
        class_of_token: int32 ``[n, ids]``; C or more for tokens of no class.
        end_token: int64 ``[n]``, the lowest id that ends a text.
        count: int64 ``[n]``, each canvas' own C.
        wide: int64 ``[n]``, the wide class, or -1.
        chunks: how many chunks each canvas has, on the host.
        narrow_chunks: how many of them are not those of the wide class.
        most_chunks: how many chunks the largest class of any canvas has.
    """

    token: torch.Tensor
    padding: torch.Tensor
    chunk_class: torch.Tensor
    first_chunk: torch.Tensor
    behind_chunk: torch.Tensor
    class_of_token: torch.Tensor
    end_token: torch.Tensor
    count: torch.Tensor
    wide: torch.Tensor
    chunks: tuple[int, ...]
    narrow_chunks: tuple[int, ...]
    most_chunks: int

    @classmethod
    def join(cls, parts: Sequence[TokenClasses]) -> BatchClasses:
        """Join the classes of the canvases, which are on one device."""
        classes = max(part.classes for part in parts)
        chunks = max(len(part.chunk_class) for part in parts)
        numbers = torch.stack([part.numbers for part in parts], 1)
        return cls(
            token=_stacked([part.token for part in parts], chunks, 0),
            padding=_stacked([part.padding for part in parts], chunks, 0),
            chunk_class=_stacked([part.chunk_class for part in parts], chunks, classes),
            first_chunk=_stacked([part.first_chunk for part in parts], classes + 1, 0),
            behind_chunk=_stacked([part.behind_chunk for part in parts], classes + 1, 0),
            class_of_token=_stacked([part.class_of_token for part in parts], None, 0),
            end_token=numbers[0],
            count=numbers[1],
            wide=numbers[2],
            chunks=tuple(len(part.chunk_class) for part in parts),
            narrow_chunks=tuple(part.narrow_chunks for part in parts),
            most_chunks=max(part.most_chunks for part in parts),
        )

    @property
    def classes(self) -> int:
        """C."""
        return self.first_chunk.shape[1] - 1

    def of_tokens(self, token: torch.Tensor) -> torch.Tensor:
        """The classes of ids, int64 ``[n, L]``; C or the canvas' own C for tokens of none.

        A prompt may hold ids of the tokenizer that the model's head does not have. Their results
        are meaningless.
        """
        return self.class_of_token.gather(
            1, token.clamp(0, self.class_of_token.shape[1] - 1)
        ).long()


def _stacked(parts: Sequence[torch.Tensor], size: int | None, fill: int) -> torch.Tensor:
    """Join tensors of different lengths, padded to `size`; no copy if all are the same."""
    first, same = parts[0], all(part is parts[0] for part in parts)
    whole = list(parts[:1] if same else parts)
    if size is not None and any(len(part) < size for part in whole):
        whole = [
            torch.cat([part, part.new_full((size - len(part), *part.shape[1:]), fill)])
            for part in whole
        ]
    if same:
        return whole[0].expand(len(parts), *(-1 for _ in first.shape))
    return torch.stack(whole)


def _wide_class(size: np.ndarray) -> int:
    """The class that has more than half of all tokens, or -1, given sizes with no class last."""
    largest = int(size.argmax())
    return largest if largest < len(size) - 1 and 2 * size[largest] > size.sum() else -1
