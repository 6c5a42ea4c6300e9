"""A request that is preempted by priority leaves no page to share that is not final."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checkpoints import TINY_SDAR
from tests.support.drive import Driver, llada2
from tests.support.engine import Engine, engine

pytestmark = pytest.mark.engine

PAGE = 32
SMALL: dict[str, Any] = {
    "block_size": PAGE,
    "num_gpu_blocks_override": 40,
    "long_prefill_token_threshold": 32,
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
}
# Several blocks whose decided beginning leaves before they are committed.
BLOCKS = {"additional_config": {"dllm": {"blocks": 4}}, "diffusion_config": None}


def shared(running: Engine, request: Any, first: int) -> list[int]:
    """The pages of a request, from one on, that another request may find."""
    (ids,) = running.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return [n for n in ids[first:] if running.block_pool.blocks[n].block_hash is not None]


@pytest.mark.parametrize("name", ["waits", "ahead", "blocks", "blocks ahead"])
def test_pages_of_dropped_steps_are_forgotten(name: str) -> None:
    family = llada2()
    options: dict[str, Any] = SMALL | {"async_scheduling": name.endswith("ahead")}
    several = name.startswith("blocks")
    path, length = (TINY_SDAR, 8) if several else (family.path, family.length)
    with engine(path, length, **(options | (BLOCKS if several else {}))) as running:
        scheduler, wrong, found = running.scheduler, [], []
        original = scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            # A canvas that streams counts as computed, and so does a step in flight.
            final = max(0, request.num_computed_tokens - 2 * running.slots.length) // PAGE
            found.extend(shared(running, request, request.num_computed_tokens // PAGE))
            original(request, *args, **kwargs)
            pool = running.block_pool.blocks
            wrong.extend(n for n in ids[final:] if pool[n].block_hash is not None)

        scheduler._preempt_request = preempt
        manager, full = scheduler.kv_cache_manager, [True]
        allocate = manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            """No page is left when the second request, which runs already, wants its next one."""
            if request in scheduler.running and request.priority == 0 and full:
                full.clear()
                return None
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = allocate_slots
        driver = Driver(running)
        vocabulary = range(20, 100) if several else family.vocabulary
        core = running.llm.llm_engine
        for n, length in enumerate((280, 30)):
            prompt = [vocabulary[(7 * n + i) % 70] for i in range(length)]
            streams = {"diffusion_stream_prefix": True}
            asked = family.params(30 if n == 0 else 90, "quick", ignore_eos=True, **streams)
            priority = 0 if n else 9
            core.add_request(f"{n}", {"prompt_token_ids": prompt}, asked, priority=priority)
            driver.step()
        driver.finish()
        assert found, "nobody was preempted after being scheduled"
        assert not wrong
        running.assert_idle()
