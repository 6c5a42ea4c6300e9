"""The constraints of running requests: which automaton a slot follows, and how far it has come.

A batch without a constrained request pays one look at the host. In a batch with some, canvases that
share an automaton are one group, and a step is tensor operations on each group; see
`vllm_dllm.constraints` for what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from vllm_dllm.constraints.distance import DEAD
from vllm_dllm.constraints.paths import DeviceAutomaton, Window
from vllm_dllm.constraints.reduction import TokenChunks
from vllm_dllm.constraints.step import Chosen, best_tokens, drawn_tokens, sureness
from vllm_dllm.constraints.token_automaton import TokenAutomaton
from vllm_dllm.ops.row_stats import EntropyStatistics, RowStatistics
from vllm_dllm.ops.sampled_stats import SampledStatistics

FREE = -1


@dataclass(frozen=True)
class Path:
    """What constraints make of a batch, in batch order; ``n`` canvases.

    Attributes:
        chosen: ``[n, L]``, see `Chosen`; of canvases without a constraint nothing is inside.
        constrained: bool ``[n]``.
    """

    chosen: Chosen
    constrained: torch.Tensor

    def take(self, some: slice) -> Path:
        """Views of some canvases, through which they can be written."""
        parts = (getattr(self.chosen, f.name)[some] for f in fields(Chosen))
        return Path(Chosen(*parts), self.constrained[some])

    def put(self, index: torch.Tensor, chosen: Chosen) -> None:
        """Write what was found for the canvases at ``index`` (int64 ``[m]``)."""
        for f in fields(Chosen):
            getattr(self.chosen, f.name).index_copy_(0, index, getattr(chosen, f.name))
        self.constrained.index_fill_(0, index, True)


@dataclass(frozen=True)
class Follower:
    """An automaton where the model runs, and how its classes lie in the vocabulary."""

    automaton: DeviceAutomaton
    chunks: TokenChunks

    def choose(
        self, logits: torch.Tensor, window: Window, keys: torch.Tensor | None = None
    ) -> Chosen:
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
    window: Window,
    path: Path,
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
            sure = _sure_of_drawn(drawn, rows, chosen.token)
        else:
            logits = rows(scores.logits)
            chosen = follower.choose(logits, some)
            sure = sureness(chosen, logits.float().logsumexp(-1))
        path.put(index, chosen)
        found.token.view(shape).index_copy_(0, index, chosen.token)
        sure = torch.where(chosen.inside, sure, 1.0)
        found.probability.view(shape).index_copy_(0, index, sure)
        if isinstance(found, EntropyStatistics):
            entropy = torch.where(chosen.inside, rows(found.entropy), 0.0)
            found.entropy.view(shape).index_copy_(0, index, entropy)


def _sure_of_drawn(
    drawn: Drawn, rows: Callable[[torch.Tensor], torch.Tensor], token: torch.Tensor
) -> torch.Tensor:
    """As `with_samples`, float32 ``[m, L]``."""
    scaled, top = rows(drawn.scaled), rows(drawn.greedy.token)
    weight = scaled.gather(2, token[..., None]) - scaled.gather(2, top[..., None])
    return torch.minimum(rows(drawn.greedy.probability), weight[..., 0].exp().float())


def on_path(
    found: SampledStatistics,
    distribution: torch.Tensor,
    logits: torch.Tensor,
    draws: tuple[torch.Tensor, torch.Tensor] | None,
    followed: tuple[Follower, Window],
) -> tuple[SampledStatistics, Chosen]:
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
        self._numbers: dict[str, int] = {}  # by the automaton's digest
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
        known = TokenAutomaton.from_bytes(packed)
        self._which[slot] = self._number(hashlib.sha256(packed).hexdigest(), known)
        state = known.advance(0, put_out)
        self.state[slot].fill_(known.states if state == DEAD else state)

    def leave(self, slot: int) -> None:
        """The request in ``slot`` is gone; an automaton may hold a hundred megabytes."""
        if self._which[slot] != FREE:
            self._which[slot] = FREE
            self._forget()

    def _forget(self) -> None:
        """Drop what no request follows any more."""
        used = set(self._which.tolist())
        self._followers = {n: known for n, known in self._followers.items() if n in used}
        self._numbers = {key: n for key, n in self._numbers.items() if n in used}

    def _number(self, key: str, known: TokenAutomaton) -> int:
        """The number of an automaton; equal ones share it."""
        if key not in self._numbers:
            automaton = DeviceAutomaton.of(known, self.device)
            chunks = TokenChunks.of(automaton.class_of_token, automaton.classes)
            self._numbers[key] = self._next
            self._followers[self._next] = Follower(automaton, chunks)
            self._next += 1
        return self._numbers[key]

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

    def advance(self, slots: torch.Tensor, path: Path, out: torch.Tensor) -> None:
        """Note how far the requests of ``slots`` (int64 ``[n]``) have come.

        `out` int64 ``[n]`` is the prefix of each canvas that has been put out by now; where it is
        what it was, the state does not change either.
        """
        state = path.chosen.states.gather(1, out[:, None])[:, 0]
        self.state.index_copy_(0, slots, state)

    def nothing_found(self, window: Window) -> Path:
        """The path of a batch before any canvas' is found."""
        count, length = window.forced.shape
        state = window.state[:, None].repeat(1, length + 1)
        inside = torch.zeros_like(window.forced, dtype=torch.bool)
        logit = torch.zeros(count, length, device=self.device)
        feasible = torch.ones(count, dtype=torch.bool, device=self.device)
        token = window.forced.clone()
        return Path(Chosen(token, logit, inside, state, feasible), torch.zeros_like(feasible))
