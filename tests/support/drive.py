"""Two small models in real engines, driven step by step so that tests know every phase."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import (
    oracle,
    reference_diffcoder,
    reference_fast_dllm,
    reference_llada22,
    reference_nemotron,
    reference_openpangu,
)
from tests.support.checkpoints import TEXT_ONLY_OPTIONS
from tests.support.engine import Engine, engine, greedy
from tests.support.reference_gemma import random_checkpoint
from vllm_dllm.engine.slots import Phase

PAGE = 32
# Every step reads the block before a canvas, too.
TWO_BLOCKS: dict[str, Any] = {
    "async_scheduling": True,
    "additional_config": {"dllm": {"fused_commit": "on"}},
}
# No test needs nearly as many; one that takes more hangs.
MANY_STEPS = 400


@dataclass(frozen=True)
class Family:
    """A model family's small checkpoint, and what its engines and requests need.

    Attributes:
        aligned: whether canvases begin at multiples of L, so that prompts have a tail.
        vocabulary: ids that prompts may hold, without special ones.
        slow: request options for one to two tokens a step, so that phases last.
        quick: request options for the fewest steps.
        lengths: of prompts in `test_lifecycle`: two bystanders, a newcomer and the victim.
        budget: tokens of a step: three canvases, and chunks shorter than the victim.
    """

    name: str
    path: Path
    length: int
    aligned: bool
    vocabulary: range
    engine: dict[str, Any]
    slow: dict[str, Any]
    quick: dict[str, Any]
    lengths: tuple[int, ...] = (13, 30, 11, 45)
    budget: int = 32

    def start(self, **options: Any) -> contextlib.AbstractContextManager[Engine]:
        """An engine with one pass in a step, so that steps meet every phase."""
        given = {"block_size": PAGE} | self.engine | options
        dllm = {"passes_per_step": 1} | given.pop("additional_config", {}).get("dllm", {})
        return engine(self.path, self.length, additional_config={"dllm": dllm}, **given)

    def tail(self, prompt: Sequence[int]) -> int:
        return len(prompt) % self.length if self.aligned else 0

    def params(self, max_tokens: int, pace: str = "slow", **options: Any) -> Any:
        """Greedy; DiffusionGemma's canvases start from a seed all the same."""
        own = self.slow if pace == "slow" else self.quick
        return greedy(max_tokens, **({"seed": 8} | own | options))

    def prompts(self, lengths: Iterable[int], seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.choice(self.vocabulary) for _ in range(n)] for n in lengths]


SLOW, QUICK = {"diffusion_threshold": 2.0}, {"diffusion_threshold": 0.0}
# Of checkpoints that state their blocks.
OWN: dict[str, Any] = {"diffusion_config": None}


def llada2() -> Family:
    golden = oracle.checkpoint("ckpt_b_b8")
    length, vocabulary = golden.block_size, range(5, 500)
    return Family("llada2", golden.path, length, True, vocabulary, {}, SLOW, QUICK)


def gemma(path: Path) -> Family:
    if not path.exists():
        random_checkpoint(path, seed=1, canvas=32, sliding_window=48)
    steps = [{"diffusion_max_steps": most} for most in (6, 1)]
    vocabulary, lengths = range(12, 272), (40, 21, 35, 75)
    return Family("gemma", path, 32, False, vocabulary, TEXT_ONLY_OPTIONS, *steps, lengths, 100)


def nemotron(path: Path) -> Family:
    if not path.exists():
        reference_nemotron.random_checkpoint(path, block=8, likely=5)
    return Family("nemotron", path, 8, False, range(3, 100), OWN, SLOW, QUICK)


def diffcoder(path: Path) -> Family:
    if not path.exists():
        reference_diffcoder.random_checkpoint(path)
    length, vocabulary = reference_diffcoder.BLOCK, range(6, 290)
    lengths = (13, 30, length + 3, 45)
    return Family("diffcoder", path, length, True, vocabulary, OWN, SLOW, QUICK, lengths)


def fast_dllm(path: Path) -> Family:
    """The victim's prompt ends with a block, whose last row predicts the boundary token."""
    if not path.exists():
        reference_fast_dllm.random_checkpoint(path, block=8)
    return Family("fast-dllm", path, 8, True, range(5, 290), OWN, {}, {}, (13, 32, 16, 64))


def openpangu(path: Path) -> Family:
    if not path.exists():
        reference_openpangu.random_checkpoint(path, block=8)
    return Family("openpangu", path, 8, False, range(5, 290), OWN, {}, QUICK)


def llada22(path: Path) -> Family:
    if not path.exists():
        reference_llada22.random_checkpoint22(path, 8)
    quick = reference_llada22.Rule(299, 290, 291, threshold=0.3, max_post_edit_steps=4)
    slow = replace(quick, threshold=1.0).options()
    return Family("llada2.2", path, 8, True, range(5, 280), {}, slow, quick.options())


@dataclass
class Driver:
    """One engine, stepped by hand; requests are known by the names that the test gave them."""

    running: Engine
    outputs: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], params: Any) -> None:
        asked = {"prompt_token_ids": list(prompt)}
        self.running.llm.llm_engine.add_request(name, asked, params)

    def step(self) -> list[str]:
        """One step; the names of the requests that ended in it."""
        ended = []
        for output in self.running.llm.llm_engine.step():
            self.outputs[output.request_id] = output.outputs[0]
            if output.finished:
                ended.append(output.request_id)
        return ended

    def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(MANY_STEPS):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {MANY_STEPS} steps")

    def finish(self) -> dict[str, list[int]]:
        """The tokens of every request, once all have ended."""
        engine_ = self.running.llm.llm_engine
        self.until(lambda: not engine_.has_unfinished_requests())
        # With a step in flight the core has one more result to throw away.
        while self.running.core.batch_queue:
            self.running.step()
        return {name: list(one.token_ids) for name, one in self.outputs.items()}

    def request(self, name: str) -> Any:
        """vLLM's own record, or None when it has ended."""
        known = self.running.scheduler.requests.values()
        return next((r for r in known if r.request_id.startswith(f"{name}-")), None)

    def slot(self, name: str) -> int | None:
        request, known = self.request(name), self.running.runner.req_states.req_id_to_index
        return None if request is None else known.get(request.request_id)

    def canvas(self, name: str) -> tuple[Phase, int, int] | None:
        """(phase, start, step) of a request's canvas as the worker has it."""
        slot, slots = self.slot(name), self.running.slots
        if slot is None:
            return None
        return Phase(slots.phase[slot].item()), slots.start[slot].item(), slots.step[slot].item()


def assert_nothing_held(running: Engine) -> None:
    """No request, slot or KV block; only then can vLLM empty its prefix cache."""
    running.assert_idle()
    assert running.scheduler.reset_prefix_cache()
