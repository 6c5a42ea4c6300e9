"""The best path of each canvas through its automaton, or a drawn one, by dynamic programming.

A canvas of L positions gives each class of tokens a weight at each position: the largest logit of
its tokens, or the log-sum-exp of their logits. A path is one class for each position of the canvas'
*window*. It starts in a given state and ends in a state from which the rest of the token budget is
enough to finish the text. Its weight is the sum of the weights of its classes, but forced
positions, where all paths have the same class, weigh nothing. Positions after the end of a text are
ignored, so each of them weighs as much as all tokens together: the largest of all logits, or
their log-sum-exp. Otherwise a model that writes something other than end-of-sequence tokens there
would be led to texts that do not end.

First, messages are passed from the last position to the first. The message of a state is the
largest weight of any path from that state on (Viterbi), or the logarithm of the sum over all paths
(then the walk below is forward filtering, backward sampling with the two directions exchanged).
Then one walk from the first position to the last chooses an edge of the automaton at each position,
greedily or at random, a class of the edge's label, and a token of the class. The result is exact,
and the walk never runs into a dead end. A tie goes to the edge whose label has the lowest class,
then to the lowest class, then to the lowest token.

Tokens of a class are drawn in three stages, so that little noise is needed however large the class
is: a range of `CHUNK` chunks of the class, then a chunk, then a token.

Weights are added in float64: over 256 positions they add up to thousands, and in float32 close
paths would become ties. Sums of exponentials are computed to base 2 relative to their largest term,
so only terms that do not matter underflow.

Two implementations find the same paths: `cpu_paths` for CPUs and `paths_triton` for other devices.
A drawn path may differ between them where two scores tie within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

# The smallest weight. Clamping keeps every class possible that the automaton allows, because the
# output must be valid even if a model rules out all tokens that the constraint allows.
FLOOR = -1e6
LOG2_E = 1.4426950408889634
# The sum of a wide class is that of its row without all other tokens only if this share is left.
# The less is left, the more the rounding of both sums matters.
LEAST_SHARE = 0.5
# Draws use the keys of a position at indices beyond those that an engine uses for ids: a token that
# was drawn without a constraint must be independent of the path.
FIRST_RANGE_INDEX = (1 << 30) + (1 << 28)
FIRST_CHUNK_INDEX = FIRST_RANGE_INDEX + (1 << 26)
FIRST_MEMBER_INDEX = FIRST_CHUNK_INDEX + (1 << 26)
FIRST_EDGE_INDEX = FIRST_RANGE_INDEX + (1 << 28)
FIRST_CLASS_INDEX = FIRST_EDGE_INDEX + (1 << 28)


@dataclass(frozen=True)
class CanvasWindow:
    """The positions of each canvas that must follow the automaton, and the state to start from.

    Attributes:
        state: int64 ``[n]``, the state of the canvas' automaton before the window.
        first: int64 ``[n]``, the window's first position: after the part of the prompt that is in
            the canvas, and after the tokens of the canvas that have been emitted.
        budget: int64 ``[n]``, how many tokens may be emitted from `first` on, including the one
            that ends the text.
        width: int64 ``[n]``, the number of positions of the canvas, at most L.
        forced: int64 ``[n, L]``, tokens that must stay, or -1 where the path is free. Outside the
            window the automaton ignores them.
    """

    state: torch.Tensor
    first: torch.Tensor
    budget: torch.Tensor
    width: torch.Tensor
    forced: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """Int64 ``[n]``, the position after the window's last."""
        return torch.minimum(self.first + self.budget, self.width).clamp_min(self.first)

    def inside(self) -> torch.Tensor:
        """Bool ``[n, L]``, which positions are in the window."""
        position = torch.arange(self.forced.shape[1], device=self.forced.device)
        return (position >= self.first[:, None]) & (position < self.end[:, None])

    def wanted(self) -> torch.Tensor:
        """Bool ``[n, L]``, the positions of the window whose token is not forced."""
        return self.inside() & (self.forced < 0)

    def part(self, canvases: slice) -> CanvasWindow:
        """The windows of a slice of the canvases."""
        return CanvasWindow(*(getattr(self, f.name)[canvases] for f in fields(self)))


@dataclass
class ConstrainedPath:
    """The tokens of one path through each canvas. A `PathFinder` writes them in place.

    Attributes:
        token: int64 ``[n, L]``. Inside the window, the tokens of the path, forced ones included.
            After the window, a token that ends the text. Before the window, the token that is
            forced there, or else the one that ends the text.
        margin: float32 ``[n, L]``, the logit of `token` less that of the likeliest token.
        inside: bool ``[n, L]``, which positions are in the window.
        after_end: bool ``[n, L]``, positions of the window after the token that ends the text.
        states: int64 ``[n, L + 1]``, the automaton's state before each position, and after the
            last.
        feasible: bool ``[n]``. If false, there is no path: `token` is as outside the window, and
            `states` stay the first.
    """

    token: torch.Tensor
    margin: torch.Tensor
    inside: torch.Tensor
    after_end: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor

    @classmethod
    def empty(cls, window: CanvasWindow) -> ConstrainedPath:
        """Make one for canvases whose paths are not known yet, with no position inside."""
        forced = window.forced
        inside, after_end = torch.zeros((2, *forced.shape), dtype=torch.bool, device=forced.device)
        states = window.state[:, None].repeat(1, forced.shape[1] + 1)
        margin = torch.zeros_like(forced, dtype=torch.float32)
        feasible = torch.ones_like(window.state, dtype=torch.bool)
        return cls(forced.clone(), margin, inside, after_end, states, feasible)

    def like(self) -> ConstrainedPath:
        """Memory for as many other paths."""
        return ConstrainedPath(*(torch.empty_like(getattr(self, f.name)) for f in fields(self)))

    def part(self, canvases: slice) -> ConstrainedPath:
        """Views of a slice of the canvases; writing to them writes to this object."""
        return ConstrainedPath(*(getattr(self, f.name)[canvases] for f in fields(self)))

    def probability(self, likeliest: torch.Tensor) -> torch.Tensor:
        """The model's probability of each token, float32 ``[n, L]``; 1 outside the window.

        Args:
            likeliest: float32 ``[n, L]``, the model's probability of the likeliest token.
        """
        return torch.where(self.inside, self.margin.exp() * likeliest, 1.0)


@dataclass(frozen=True)
class FreeTokens:
    """The tokens that ``n`` canvases would hold if there were no constraint.

    Drawing a path needs all of these attributes, finding the best one only the first.

    Attributes:
        likeliest: int64 ``[n, L]``, the tokens of the largest logits, allowed or not; the lowest
            ids where logits tie.
        drawn: int64 ``[n, L]``, tokens drawn from the same logits, with the same keys but at
            indices below FIRST_RANGE_INDEX.
        share: float32 ``[n, L]``, the probability of the likeliest token in the distribution that
            is drawn from.
        keys: int64 ``[n, L]``, the noise key of each position.
        temperature: float32 ``[n]``, by which logits must still be divided, 0 for not at all; None
            if all have been.
    """

    likeliest: torch.Tensor
    drawn: torch.Tensor | None = None
    share: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
