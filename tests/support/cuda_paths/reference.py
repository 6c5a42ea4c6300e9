"""Paged attention as the kernels of vLLM's backends compute it, with checks of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tests.support.cuda_paths.expected import ExpectedKeys

# (index of the sequence, positions of its query, tokens of the sequence) to the first key that
# each position sees, and the end of its keys.
Edges = Callable[[int, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class KernelCall:
    """What a backend hands to its attention kernel.

    Attributes:
        query: ``[tokens, heads, head size]``.
        keys, values: ``[pages, page size, KV heads, head size]``.
        out: of the shape of `query`; written.
        query_start: int ``[sequences + 1]``, where each sequence's query begins.
        seq_lens: int ``[sequences]``, tokens of each sequence, its query included.
        page_table: int ``[sequences, pages]``.
        max_query_len, max_seq_len: bounds that the backend promises, numbers on the host.
        scale: factor of the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for no cap.
        edges: the mask.
        window: W of the layer's sliding window, 0 for a layer without one.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    soft_cap: float
    edges: Edges
    window: int = 0


def attend(call: KernelCall) -> None:
    """Write the attention of every sequence to `call.out`, in float32."""
    group = call.query.shape[1] // call.keys.shape[2]
    for sequence, begin, end, length in _sequences(call):
        if length == 0:  # padding of a graph
            call.out[begin:end] = 0
            continue
        query = call.query[begin:end].float()
        pages = call.page_table[sequence, : -(-length // call.keys.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for cache in (call.keys, call.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * call.scale
        if call.soft_cap:
            scores = call.soft_cap * (scores / call.soft_cap).tanh()
        position = torch.arange(length - (end - begin), length)
        first, last = (edge[:, None] for edge in call.edges(sequence, position, length))
        key = torch.arange(length)
        hidden = (key < first) | (key >= last)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        call.out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(call.out.dtype)


def problems(call: KernelCall, expected: ExpectedKeys | None) -> Iterator[str]:
    """What a kernel would get wrong, or read out of bounds.

    Args:
        call: what the backend handed over.
        expected: the keys that the step's tokens must see; None where nothing is known of the
            step, as in a capture.
    """
    sequences = len(call.query_start) - 1
    for what, rows in ("lengths", len(call.seq_lens)), ("rows of pages", len(call.page_table)):
        if rows < sequences:
            yield f"{sequences} sequences, but {rows} {what}"
            return
    if int(call.query_start[-1]) > len(call.query):
        yield f"queries end at token {int(call.query_start[-1])} of {len(call.query)}"
        return
    wanted = None if expected is None else expected.edges(call.window)
    seen = 0
    for sequence, begin, end, length in _sequences(call):
        yield from _bounds(call, sequence, end - begin, length)
        if expected is not None and begin < expected.tokens:
            position = torch.arange(length - (end - begin), length)
            found = torch.stack([position, *call.edges(sequence, position, length)])
            found[2] = found[2].clamp(max=length)
            yield from _differences(found, wanted[:, begin:end], begin)
            seen = end
    if expected is not None and seen != expected.tokens:
        yield f"{expected.tokens} tokens, but queries of {seen}"


def _sequences(call: KernelCall) -> Iterator[tuple[int, int, int, int]]:
    """(index, first token, end, length) of every sequence with a query."""
    start, lengths = call.query_start.tolist(), call.seq_lens.tolist()
    for sequence, (begin, end) in enumerate(itertools.pairwise(start)):
        if end > begin:
            yield sequence, begin, end, lengths[sequence]


def _bounds(call: KernelCall, sequence: int, tokens: int, length: int) -> Iterator[str]:
    if tokens > call.max_query_len:
        yield f"a query of {tokens} tokens, promised at most {call.max_query_len}"
    if length > call.max_seq_len:
        yield f"a sequence of {length} tokens, promised at most {call.max_seq_len}"
    pages = call.page_table[sequence, : -(-length // call.keys.shape[1])]
    if len(pages) * call.keys.shape[1] < length:
        yield f"a sequence of {length} tokens, but {len(pages)} pages of {call.keys.shape[1]}"
    elif len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < len(call.keys):
        yield f"pages {pages.tolist()} of a cache of {len(call.keys)}"


def _differences(found: torch.Tensor, wanted: torch.Tensor, begin: int) -> Iterator[str]:
    """The first token whose position or keys are not the expected ones, both ``[3, n]``."""
    if found.shape != wanted.shape:
        yield f"a query of {found.shape[1]} tokens, where only {wanted.shape[1]} are left"
        return
    wrong = (found != wanted).any(0).nonzero()[:, 0].tolist()
    for at in wrong[:1]:
        (p, a, b), (q, c, d) = found[:, at].tolist(), wanted[:, at].tolist()
        yield (
            f"token {begin + at} at position {p} sees keys {a} to {b - 1}; "
            f"it is at {q} and must see {c} to {d - 1}"
        )
