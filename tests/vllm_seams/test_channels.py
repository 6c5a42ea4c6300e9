"""What is sent in a borrowed field arrives, also through vLLM's messages between processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_dllm.vllm_seams import channels
from vllm_dllm.vllm_seams.channels import PassFlags, records
from vllm_dllm.vllm_seams.channels.records import ABSENT, Record, StepRecords, TracedLogprobs


def through_a_message(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))


def test_passes() -> None:
    flags = torch.tensor([0, PassFlags.COMMITTED | PassFlags.LEFT, PassFlags.WAITED])
    sent = channels.encode_passes(torch.tensor([True, True, False]), flags, torch.tensor([1, 1, 3]))
    output = SimpleNamespace(num_nans_in_logits=dict(zip("abc", sent.tolist(), strict=True)))
    told, failures = channels.decode_passes(output)
    assert told == {"a": 0, "b": PassFlags.COMMITTED | PassFlags.LEFT}
    assert failures == {"c": 3}
    assert channels.decode_passes(SimpleNamespace(num_nans_in_logits=None)) == ({}, {})


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


def test_records_of_a_request() -> None:
    tokens = np.array([7, 8, ABSENT], np.int32)
    scores = np.array([-1.5, -0.5, 0], np.float32)
    passes = [
        Record(5, 900, 32, step, PassFlags.LEFT, tokens, scores, -scores, threshold)
        for step, threshold in enumerate((None, 0.7))
    ]
    output = EngineCoreOutput("a", [7, 8])
    records.put_records(output, 6, passes)
    (arrived,) = through_a_message(EngineCoreOutputs(outputs=[output])).outputs
    found = records.take_records(arrived)
    assert found is not None and arrived.new_sampling_mask is None
    asked, (first, second) = found
    assert asked == 6 and (first.step, second.step) == (0, 1)
    assert second[:5] == (5, 900, 32, 1, PassFlags.LEFT) and isinstance(second.flags, PassFlags)
    assert [array.tolist() for array in second[5:8]] == [[7, 8], [-1.5, -0.5], [1.5, 0.5]]
    assert (first.threshold, second.threshold) == (None, 0.7)
    assert records.take_records(arrived) is None


def test_counts() -> None:
    stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"theirs": 2})
    counted = {("EntropyBound", "blocks"): 3, ("a:b", "blocks"): 1}
    channels.put_counts(stats, counted)
    arrived = through_a_message(EngineCoreOutputs(scheduler_stats=stats)).scheduler_stats
    assert arrived is not None
    assert channels.take_counts(arrived) == counted
    assert arrived.num_kv_fetch_reqs_by_stage == {"theirs": 2}
