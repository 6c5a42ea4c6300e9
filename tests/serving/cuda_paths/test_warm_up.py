"""vLLM's warm-up of GPU workers, which CPU workers skip, on the CPU engine.

It sends a full batch in which every request asks for logprobs, filters and penalties, so what such
a request holds decides whether a server starts.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.engine import Engine, engine
from tests.support.sampler import size, tensors_in

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, REQUESTS = 32, 12


class Held:
    """What logprobs hold whenever the rows of a batch have been read, and what else is alive."""

    def __init__(self, running: Engine) -> None:
        self.reports = running.runner.model_state.parts.logprobs
        self.vocabulary = running.slots.kind.vocabulary
        self.bytes: list[int] = []
        self.before = {id(tensor) for tensor in self._with_whole_rows()}
        self.rows: list[tuple[int, ...]] = []
        self.observe = self.reports.observe
        self.reports.observe = self._watched

    def _with_whole_rows(self) -> list[torch.Tensor]:
        """Float tensors of any owner with several rows as wide as the vocabulary.

        A request with biases has one such row, whatever the number of its positions.
        """
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        floats = (tensor for tensor in found if tensor.is_floating_point() and tensor.ndim > 1)
        return [tensor for tensor in floats if self.vocabulary in tensor.shape]

    def _watched(self, *args: Any) -> None:
        self.bytes.append(size(tensors_in(self.reports)))
        alive = self._with_whole_rows()
        self.rows += [tuple(tensor.shape) for tensor in alive if id(tensor) not in self.before]
        self.observe(*args)
        self.bytes.append(size(tensors_in(self.reports)))


def warm_up(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``Worker.compile_or_warm_up_model`` of GPU workers calls."""
    from vllm.v1.worker.gpu import warmup
    from vllm.v1.worker.gpu.sample import prompt_logprob

    def no_ids(num_tokens: int, *_: Any) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64)

    # The CPU has no stand-in for this kernel, because admission refuses prompt_logprobs.
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", no_ids)
    worker = running.core.model_executor.driver_worker.worker
    warmup.warmup_kernels(running.runner, worker.execute_model, worker.sample_tokens)


@pytest.mark.parametrize("path", [TINY_LLADA2, TINY_GEMMA], ids=lambda path: path.name)
def test_the_warm_up_holds_no_whole_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of every request were held at once, which no GPU has the memory for."""
    options: dict[str, Any] = TEXT_ONLY_OPTIONS if path is TINY_GEMMA else {}
    with engine(path, BLOCK, max_num_seqs=REQUESTS, **options) as running:
        held = Held(running)
        warm_up(running, monkeypatch)
        assert len(held.bytes) >= 4, "the warm-up has steps with logprobs"
        assert held.rows == []
        # Six columns of ids and scores, and a few candidates with scores and ranks.
        position = 6 * 8 + 4 + (5 * 8 + 4 * 16)
        assert 0 < max(held.bytes) <= REQUESTS * BLOCK * position
        running.assert_idle()
