"""What is sent in a borrowed field arrives, also through vLLM's messages between processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.vllm_seams.channels import records
from vllm_dllm.vllm_seams.channels.records import StepRecords, TracedLogprobs


@pytest.mark.parametrize("asked", [True, False])
def test_a_step_s_records_leave_its_logprobs(asked: bool) -> None:
    """From the worker, whose output is pickled."""
    ones = torch.ones(4, 2)
    own = LogprobsTensors(ones.int(), ones, ones[:, 0].int(), [0, 2]) if asked else None
    step = StepRecords([1], torch.arange(3)[:, None], torch.ones(1, 4).int(), torch.ones(2, 1, 4))
    sent = TracedLogprobs(own, step).to_cpu_nonblocking().tolists()
    output = SimpleNamespace(logprobs=pickle.loads(pickle.dumps(sent)))
    found = records.take_step_records(output)
    assert found is not None and found.request_indices == [1]
    assert found.headers.tolist() == [[0], [1], [2]] and found.scores.shape == (2, 1, 4)
    assert (output.logprobs is not None) == asked
    if asked:
        assert output.logprobs.slice_request(1, 2).logprobs.tolist() == [[1, 1], [1, 1]]
    assert records.take_step_records(output) is None
