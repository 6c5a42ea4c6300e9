"""Denoising without a model: random logits, block after block, as an engine would do it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.constraints.joined import best_tokens, drawn_tokens, joined
from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath, tokens_kept_to_path
from vllm_dllm.ops.noise.keyed import row_keys


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
    """

    budget: int
    seed: int
    length: int = 8
    tail: int = 0
    sampled: bool = False
    edits: bool = False
    own: bool = False


class Masked:
    """A masked canvas: each step decides some positions, in any order."""

    def __init__(self, found: TokenAutomaton, ids: int, run: Run) -> None:
        self.found = found
        self.constraint = joined(found)
        self.ids, self.run = ids, run
        self.generator = torch.Generator().manual_seed(run.seed)

    def text(self) -> list[int]:
        """All tokens that are put out."""
        run, out, state, tail = self.run, [], torch.tensor([0]), self.run.tail
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
            behind = self.found.advance(int(state), np.array(new[:count]))
            state = torch.tensor([self.found.states if behind == DEAD else behind])
            tail = 0

    def is_end(self, token: int) -> bool:
        return int(self.found.class_of_token[token]) == self.found.classes - 1

    def canvas(self, state: torch.Tensor, left: torch.Tensor, tail: int) -> torch.Tensor:
        """One canvas, denoised."""
        length, run = self.run.length, self.run
        tokens = torch.full((1, length), self.ids - 1)
        masked = torch.arange(length)[None] >= tail
        fixed = ~masked
        step = 0
        while masked.any():
            held = fixed if run.edits else ~masked
            forced = torch.where(held, tokens, -1)
            some = CanvasWindow(state, torch.tensor([tail]), left, torch.tensor([length]), forced)
            chosen = self.chosen(some, step)
            assert chosen.feasible.all()
            accept = masked & (torch.rand(1, length, generator=self.generator) < 0.4)
            new = torch.where(accept, chosen.token, tokens)
            if run.own:
                odd = torch.rand(1, length, generator=self.generator) < 0.3
                new = torch.where(accept & odd, 1, new)
            masked = masked & ~accept
            tokens = tokens_kept_to_path(new, masked, chosen, fixed)
            step += 1
        return tokens

    def chosen(self, some: CanvasWindow, step: int) -> ConstrainedPath:
        logits = torch.randn(1, self.run.length, self.ids, generator=self.generator) * 3
        if not self.run.sampled:
            return best_tokens(self.constraint, logits, some)
        keys = row_keys(torch.tensor([[self.run.seed]]), step, torch.arange(self.run.length))
        return drawn_tokens(self.constraint, logits, some, keys)
