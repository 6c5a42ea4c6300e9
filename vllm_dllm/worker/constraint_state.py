"""The constraints of running requests: which automaton a slot follows, and how far it has come.

A batch without a constrained request pays one look at the host. In a batch with some, canvases that
share an automaton are one group, and a step is tensor operations on each group; see
`vllm_dllm.constraints` for what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.decoding.best_path import CanvasWindow, DeviceAutomaton
from vllm_dllm.constraints.decoding.class_weights import TokenChunks
from vllm_dllm.constraints.decoding.constrained_step import (
    ConstrainedPath,
    best_tokens,
    drawn_tokens,
    path_probability,
)
from vllm_dllm.ops.statistics.rows import EntropyStatistics, RowStatistics, with_samples
from vllm_dllm.ops.statistics.sampled import SampledStatistics

FREE = -1


@dataclass(frozen=True)
class Follower:
    """An automaton where the model runs, and how its classes lie in the vocabulary.

    Attributes:
        key: digest of what a request brings.
        known: the automaton, on the host.
    """

    key: str
    known: TokenAutomaton
    automaton: DeviceAutomaton
    chunks: TokenChunks

    @classmethod
    def of(cls, key: str, packed: bytes, device: torch.device) -> Follower:
        """From what a request brings."""
        known = TokenAutomaton.from_bytes(packed)
        automaton = DeviceAutomaton.of(known, device)
        return cls(
            key, known, automaton, TokenChunks.of(automaton.class_of_token, automaton.classes)
        )

    def choose(
        self, logits: torch.Tensor, window: CanvasWindow, keys: torch.Tensor | None = None
    ) -> ConstrainedPath:
        """A path through each canvas: the best, or with `keys` one drawn.

        Args:
            logits: ``[m, L, ids]``, over the temperature where a path is drawn.
            window: of ``m`` canvases.
            keys: int64 ``[m, L]``, or None.
        """
        if keys is None:
            return best_tokens(self.automaton, self.chunks, logits, window)
        return drawn_tokens(self.automaton, self.chunks, logits, window, keys)


@dataclass(frozen=True)
class Drawn:
    """Of a batch in which some draw; rows are ``n * L`` positions.

    Attributes:
        greedy: statistics of shape ``[rows]``, as if nobody drew.
        scaled: ``[rows, ids]``, logits over the temperature.
        filtered: the same without what filters exclude.
        keys: int64 ``[n, L]``.
    """

    greedy: RowStatistics
    scaled: torch.Tensor
    filtered: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """What paths through masked canvases are chosen by.

    Attributes:
        logits: ``[rows, ids]``.
        drawn: where a request of the batch draws.
    """

    logits: torch.Tensor
    drawn: Drawn | None = None


def follow(
    found: RowStatistics,
    scores: Scores,
    window: CanvasWindow,
    path: ConstrainedPath,
    groups: Iterable[tuple[Follower, bool, torch.Tensor]],
) -> None:
    """Put the tokens of paths, and how sure they are, in place of those that were found.

    What a path's best token is to the model is its probability; a drawn one's is that of
    `with_samples`. Positions behind the end are sure.

    Args:
        found: ``[n * L]``, changed in place.
        scores: of the same rows.
        window: of ``n`` canvases.
        path: of the same, written in place.
        groups: see `Constraints.groups`.
    """
    shape = window.forced.shape
    for follower, draws, index in groups:

        def rows(tensor: torch.Tensor, index: torch.Tensor = index) -> torch.Tensor:
            return tensor.view(*shape, *tensor.shape[1:]).index_select(0, index)

        some = window.take(index)
        if draws and scores.drawn is not None:
            drawn = scores.drawn
            keys = drawn.keys.index_select(0, index)
            chosen = follower.choose(rows(drawn.filtered), some, keys)
            greedy = drawn.greedy.view(*shape).take(index).view(-1)
            warm, token = torch.ones_like(greedy.probability), chosen.token.flatten()
            sampled = with_samples(greedy, rows(drawn.scaled).flatten(0, 1), warm, token)
            sure = torch.where(chosen.inside, sampled.probability.view_as(chosen.logit), 1.0)
        else:
            logits = rows(scores.logits)
            chosen = follower.choose(logits, some)
            sure = path_probability(chosen, logits.float().logsumexp(-1))
        path.put(index, chosen)
        found.token.view(shape).index_copy_(0, index, chosen.token)
        found.probability.view(shape).index_copy_(0, index, sure)
        if isinstance(found, EntropyStatistics):
            entropy = torch.where(chosen.inside, rows(found.entropy), 0.0)
            found.entropy.view(shape).index_copy_(0, index, entropy)


def on_path(
    found: SampledStatistics,
    distribution: torch.Tensor,
    logits: torch.Tensor,
    draws: tuple[torch.Tensor, torch.Tensor] | None,
    followed: tuple[Follower, CanvasWindow],
) -> tuple[SampledStatistics, ConstrainedPath]:
    """Statistics of one canvas of noise, with the best path's tokens and a drawn path's samples.

    Entropies stay the model's: what may be accepted is for its algorithm to say. Positions behind
    the end are sure.

    Args:
        found: ``[L]``.
        distribution: float32 ``[L, ids]``, the model's.
        logits: ``[L, ids]``.
        draws: temperature float32 ``[L]`` and keys int64 ``[L]``; None for greedy requests.
        followed: the automaton, and the window of this one canvas.

    Returns:
        The statistics, and the best path, ``[1, L]``.
    """
    follower, window = followed
    best = drawn = follower.choose(logits[None], window)
    if draws is not None:
        temperature, keys = draws
        drawn = follower.choose((logits / temperature[:, None])[None], window, keys[None])
    pick = [distribution.gather(1, path.token[0, :, None])[:, 0] for path in (best, drawn)]
    entropy = torch.where(best.inside[0], found.entropy, 0.0)
    return SampledStatistics(best.token[0], pick[0], drawn.token[0], pick[1], entropy), best


class Constraints:
    """By slot, the automaton (on the host) and its state (on the device).

    Attributes:
        state: int64 ``[slots]``, behind the tokens that a request has put out.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = device
        self._followers: dict[int, Follower] = {}
        self._which: np.ndarray = np.full(slots, FREE, dtype=np.int64)
        self._next = 0

    def enter(self, slot: int, packed: bytes | None, put_out: np.ndarray) -> None:
        """A request enters ``slot``.

        Args:
            slot: where.
            packed: its automaton, or None.
            put_out: int ``[tokens]``, what it had put out before it was preempted.
        """
        self.leave(slot)
        if packed is None:
            return
        number = self._number(packed)
        self._which[slot] = number
        known = self._followers[number].known
        state = known.advance(0, put_out)
        self.state[slot].fill_(known.states if state == DEAD else state)

    def leave(self, slot: int) -> None:
        """The request in ``slot`` is gone; an automaton may hold a hundred megabytes."""
        number, self._which[slot] = int(self._which[slot]), FREE
        if number != FREE and not (self._which == number).any():
            del self._followers[number]

    def _number(self, packed: bytes) -> int:
        """The number of an automaton; requests with equal ones share it."""
        key = hashlib.sha256(packed).hexdigest()
        for number, follower in self._followers.items():
            if follower.key == key:
                return number
        self._next += 1
        self._followers[self._next] = Follower.of(key, packed, self.device)
        return self._next

    def asked(self, on_host: np.ndarray) -> bool:
        """Whether a request of a batch is constrained."""
        return bool(self._followers) and bool((self._which[on_host] != FREE).any())

    def follower(self, slot: int) -> Follower | None:
        """What the canvases of ``slot`` follow."""
        return self._followers.get(int(self._which[slot]))

    def groups(
        self, on_host: np.ndarray, samples: np.ndarray
    ) -> Iterator[tuple[Follower, bool, torch.Tensor]]:
        """(automaton, whether paths are drawn, int64 index) of canvases that share both.

        `samples` bool ``[n]`` tells who draws.
        """
        which = self._which[on_host]
        kind = np.where(which == FREE, FREE, 2 * which + samples)
        for found in np.unique(kind[kind != FREE]).tolist():
            index = torch.from_numpy(np.flatnonzero(kind == found))
            index = index.to(self.device, non_blocking=True)
            yield self._followers[found // 2], bool(found % 2), index

    def advance(self, slots: torch.Tensor, path: ConstrainedPath, out: torch.Tensor) -> None:
        """Note how far the requests of ``slots`` (int64 ``[n]``) have come.

        `out` int64 ``[n]`` is the prefix of each canvas that has been put out by now; where it is
        what it was, the state does not change either.
        """
        self.state.index_copy_(0, slots, path.states.gather(1, out[:, None])[:, 0])
