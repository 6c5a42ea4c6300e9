"""``--max-model-len auto``: vLLM fits the context into memory after the model has been loaded."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.support.checkpoints import TINY_SDAR
from tests.support.engine import Engine, engine, greedy

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "async_scheduling": True,
    "block_size": 32,
    "max_num_seqs": 2,
    "additional_config": {"dllm": {"fused_commit": "on"}},
}


def answers(running: Engine, context: int) -> list[tuple[list[int], str]]:
    """To prompts that end just before the context, in the first window and in a later one."""
    prompts = [[(7 * i + n) % 200 for i in range(context - n)] for n in (3, 6, 30)]
    return running.generate(prompts, [greedy(500, ignore_eos=True)] * len(prompts))


def test_the_fitted_length_is_used_everywhere() -> None:
    with engine(TINY_SDAR, 4, **OPTIONS, max_model_len=-1, kv_cache_memory_bytes=600_000) as it:
        fitted = it.llm.llm_engine.model_config.max_model_len
        assert 32 < fitted < 512, "it is the model's whole context, or too short for the prompts"
        assert it.runner.model_state.parts.window.context == fitted
        found = answers(it, fitted)
        with pytest.raises(VLLMValidationError, match="what the context leaves"):
            it.generate([[1, 2, 3]], [greedy(500, min_tokens=fitted)])
    with engine(TINY_SDAR, 4, **OPTIONS, max_model_len=fitted) as it:
        assert found == answers(it, fitted)
