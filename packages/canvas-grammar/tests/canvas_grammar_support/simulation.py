"""Denoising without a model: random logits, block after block, as an engine would do it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import NO_STATE, START
from canvas_grammar.automaton.windows import Window, window
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath
from canvas_grammar.limits import CompileLimits

from canvas_grammar_support.joined import Joined, best_tokens, drawn_tokens, joined
from canvas_grammar_support.noise import row_keys


@dataclass(frozen=True)
class Run:
    """How a request is decoded.

    Attributes:
        budget: tokens that may be put out.
        seed: of logits and decisions.
        length: L.
        tail: the prompt's positions in the first canvas.
        sampled: at a temperature.
        edits: positions that are decided may change again.
        own: now and then the algorithm decides for a token of its own.
        most: about how many states of a constraint a canvas is decoded with.
    """

    budget: int
    seed: int
    length: int = 8
    tail: int = 0
    sampled: bool = False
    edits: bool = False
    own: bool = False
    most: int = CompileLimits().window_states


class Masked:
    """A masked canvas: each step decides some positions, in any order.

    A canvas follows the window of the constraint that begins in the state which the output has
    reached, or the first canvas' window if that is the whole constraint.

    Attributes:
        windows: what the canvases have followed so far.
    """

    def __init__(self, found: CompiledConstraint, ids: int, run: Run) -> None:
        self.configurations = found.configurations()
        self.ids, self.run = ids, run
        self.generator = torch.Generator().manual_seed(run.seed)
        self.windows: list[Window] = []

    def text(self) -> list[int]:
        """All tokens that are put out."""
        run, out, state, tail = self.run, list[int](), START, self.run.tail
        while True:
            left = torch.tensor([run.budget - len(out)])
            tokens = self.canvas(state, left, tail)
            new = tokens[0, tail : tail + int(left)].tolist()
            count = len(new)
            ends = [n for n, token in enumerate(new) if self.is_end(token)]
            if ends:
                count = ends[0] + 1
            out += new[:count]
            if ends or len(out) >= run.budget:
                return out
            # The state follows only the tokens that have been emitted.
            for token in new[:count]:
                state = self.configurations.after(state, token)
            assert state != NO_STATE, "what is put out satisfies the constraint so far"
            tail = 0

    def follow(self, state: int) -> tuple[Joined, torch.Tensor]:
        """What a canvas follows that begins in a state, and the state's number there."""
        if not (self.windows and self.windows[0].whole):
            run = self.run
            self.windows.append(window(self.configurations, state, run.length, run.most))
        part = self.windows[-1]
        (place,) = (part.states == state).nonzero()[0]
        return joined(part.automaton), torch.tensor([int(place)])

    def is_end(self, token: int) -> bool:
        tables = self.configurations.tables
        return int(tables.class_of_token[token]) == tables.classes - 1

    def canvas(self, first: int, left: torch.Tensor, tail: int) -> torch.Tensor:
        """One canvas, denoised."""
        length, run = self.run.length, self.run
        constraint, state = self.follow(first)
        tokens = torch.full((1, length), self.ids - 1)
        masked = torch.arange(length)[None] >= tail
        fixed = ~masked
        step = 0
        while masked.any():
            held = fixed if run.edits else ~masked
            forced = torch.where(held, tokens, -1)
            some = CanvasWindow(state, torch.tensor([tail]), left, torch.tensor([length]), forced)
            chosen = self.chosen(constraint, some, step)
            assert chosen.feasible.all()
            accept = masked & (torch.rand(1, length, generator=self.generator) < 0.4)
            new = torch.where(accept, chosen.token, tokens)
            if run.own:
                odd = torch.rand(1, length, generator=self.generator) < 0.3
                new = torch.where(accept & odd, 1, new)
            masked = masked & ~accept
            tokens = torch.where(chosen.inside & ~masked & ~fixed, chosen.token, new)
            step += 1
        return tokens

    def chosen(self, constraint: Joined, some: CanvasWindow, step: int) -> ConstrainedPath:
        """The path of a step."""
        logits = torch.randn(1, self.run.length, self.ids, generator=self.generator) * 3
        if not self.run.sampled:
            return best_tokens(constraint, logits, some)
        keys = row_keys(torch.tensor([[self.run.seed]]), step, torch.arange(self.run.length))
        return drawn_tokens(constraint, logits, some, keys)
