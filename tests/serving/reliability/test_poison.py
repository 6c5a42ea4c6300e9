"""A request whose logits are NaN or infinite is ended alone, with an error, and leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.drive import Driver
from tests.support.engine import Engine, count_calls, engine, greedy

pytestmark = pytest.mark.engine

PROMPTS = [[20 + i] * (9 + 5 * i) for i in range(4)]
VICTIM = 2


def ask(running: Engine, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    params = [
        greedy(2 * running.slots.length, seed=n, ignore_eos=True, diffusion_max_steps=3)
        for n, _ in enumerate(prompts)
    ]
    return running.generate(prompts, params)


class Poisoned:
    """The sampler, with one request's hidden states spoiled from its n-th canvas step on."""

    def __init__(self, running: Engine, prompt: list[int], value: float, steps: int) -> None:
        self.runner, self.prompt, self.value, self.steps = running.runner, prompt, value, steps
        self.sampler = running.runner.sampler

    def __enter__(self) -> None:
        self.runner.sampler = self

    def __exit__(self, *_: Any) -> None:
        self.runner.sampler = self.sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, hidden: torch.Tensor, batch: Any) -> Any:
        history = self.runner.req_states.all_token_ids.gpu
        for row in range(batch.num_reqs):
            slot = batch.idx_mapping_np[row]
            begin, end = batch.cu_num_logits_np[row : row + 2]
            ours = history[slot, : len(self.prompt)].tolist() == self.prompt
            if ours and end > begin:
                self.steps -= 1
                if self.steps <= 0:
                    hidden[end - 1, 0] = self.value
                    self.spoil_pages(slot)
        return self.sampler(hidden, batch)

    def spoil_pages(self, slot: int) -> None:
        """What a forward pass that gives NaN leaves in the cache."""
        pages = self.runner.model_state.pages
        for group, layers in enumerate(pages.groups):
            for layer in layers:
                layer.kv_cache[pages.ids(slot, group)] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("steps", [1, 4, 6], ids=["first step", "commit", "second canvas"])
def test_ended_alone(running: Engine, value: float, steps: int) -> None:
    fused = running.runner.model_state.policy.fused
    wanted = ask(running, PROMPTS)
    with Poisoned(running, PROMPTS[VICTIM], value, steps):
        found = ask(running, PROMPTS)
    assert found[VICTIM][1] == "error"
    # What left before the poison stays as it was; nothing follows.
    left = found[VICTIM][0]
    assert left == wanted[VICTIM][0][: len(left)]
    # A canvas leaves with its third step, or with a commit behind that.
    assert bool(left) == (steps == 6 or (steps == 4 and fused))
    survivors = [n for n in range(len(PROMPTS)) if n != VICTIM]
    assert [found[n] for n in survivors] == [wanted[n] for n in survivors]
    running.assert_idle()
    # Its slot and its pages are clean for whoever comes next, and nothing of it was cached.
    assert ask(running, PROMPTS) == wanted


def test_poisoned_keys_are_never_shared(running: Engine) -> None:
    """A prefix that was cached before the poison showed is forgotten."""
    prompt = [70 + i % 50 for i in range(3 * 128 + 5)]
    (wanted,) = ask(running, [prompt])
    assert running.llm.reset_prefix_cache()
    with Poisoned(running, prompt, float("nan"), 1):
        (found,) = ask(running, [prompt])
    assert found[1] == "error"
    assert len(running.block_pool.cached_block_hash_to_block) == 0, "its pages can still be found"
    assert ask(running, [prompt, *PROMPTS])[0] == wanted


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_numbers_of_eight_bits(dtype: str) -> None:
    """vLLM stores them as bytes; pages are cleaned of every NaN and infinity, and keep the rest."""
    golden = oracle.checkpoint("ckpt_b_b8")
    every = torch.arange(256, dtype=torch.uint8)
    number = torch.float8_e5m2 if dtype == "fp8_e5m2" else torch.float8_e4m3fn
    with engine(golden.path, golden.block_size, kv_cache_dtype=dtype) as running:
        driver = Driver(running)
        driver.add("one", PROMPTS[3], greedy(16, ignore_eos=True))
        driver.step()
        pages, slot = running.runner.model_state.pages, driver.slot("one")
        (layers,) = pages.groups
        ids = pages.ids(slot, 0)
        for layer in layers:
            content = layer.kv_cache[ids].view(torch.uint8)
            layer.kv_cache[ids] = every.repeat(content.numel() // 256).view_as(content)
        pages.scrub(slot)
        for layer in layers:
            found = layer.kv_cache[ids].view(number).float().flatten()
            wanted = every.view(number).float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            assert torch.equal(found, wanted.repeat(len(found) // 256))


def test_only_pages_in_doubt_are_cleaned(running: Engine) -> None:
    """Nor does an earlier pipeline stage clean others, which never learns of unsound canvases."""
    state = running.runner.model_state
    cleaned = count_calls(state.pages, "scrub")
    state.sees_logits = False
    try:
        ask(running, PROMPTS)
        running.step()  # the worker hears of finished requests with the next step
        assert not cleaned
        with Poisoned(running, PROMPTS[VICTIM], float("nan"), 1):
            ask(running, PROMPTS)
        assert len(cleaned) == 1
        driver = Driver(running)
        driver.add("900001", PROMPTS[0], greedy(64, ignore_eos=True))
        driver.step()
        running.llm.llm_engine.abort_request(["900001"], internal=False)
        ask(running, PROMPTS[1:2])
        assert len(cleaned) == 2
    finally:
        state.sees_logits = True
