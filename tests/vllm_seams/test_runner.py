"""What is changed in vLLM's runner for our models, and not for others."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dllm.vllm_seams.runner import allocate_no_grammar_bitmask


@pytest.mark.parametrize(("ours", "rows"), [(True, 0), (False, 64)])
def test_no_bitmask_for_grammars_that_never_come(
    ours: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At vLLM's default of 1024 requests it would take 0.6 GiB for LLaDA2."""
    import vllm.config
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    allocate_no_grammar_bitmask()
    parameters = inspect.signature(StructuredOutputsWorker.__init__).parameters  # not in 0.33
    monkeypatch.setattr(torch.cuda, "Stream", object)
    model: Any = SimpleNamespace(dllm="settled") if ours else SimpleNamespace()
    monkeypatch.setattr(
        vllm.config, "get_current_vllm_config", lambda: SimpleNamespace(model_config=model)
    )
    worker = StructuredOutputsWorker(
        max_num_logits=64,
        vocab_size=320,
        device=torch.device("cpu"),
        mask_stride=32,
        **{"num_bonus_tokens": 0} if "num_bonus_tokens" in parameters else {},
    )
    assert worker.grammar_bitmask.shape == (rows, 10)
    if ours:
        # vLLM's warm-up has a bitmask that forbids nothing; no other may come.
        logits, allowed = torch.zeros(2, 320), np.full((2, 10), -1, dtype=np.int32)
        worker.apply_grammar_bitmask(logits, None, ["a", "b"], allowed)
        allowed[1, 3] = 5
        with pytest.raises(RuntimeError, match="grammar of vLLM's"):
            worker.apply_grammar_bitmask(logits, None, ["a", "b"], allowed)
