"""Traces of mixed requests: complete, true to what the engine counted, and without effect.

The logprobs of a trace are those that the request gets, or would get, and what a plain model finds
when it replays the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.tiny.tasks import held_out_set
from examples.tiny.training import Encoder
from tests.support import reference_llada2, reference_sdar
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA, TINY_LLADA2
from tests.support.engine import Engine, count_calls, engine
from tests.support.long import long_but
from tests.support.mixed_requests import FAMILIES, TRACED, completions, mixed
from vllm_dllm.decoding import get_algorithm
from vllm_dllm.metrics import COUNTERS, metric_name

pytestmark = pytest.mark.engine

MODES: dict[str, dict[str, Any]] = {
    "plain": {"async_scheduling": False},
    "asynchronous": {"async_scheduling": True},
    "fused": {"additional_config": {"dllm": {"fused_commit": "on"}}},
    "own commits": {"additional_config": {"dllm": {"fused_commit": "off"}}},
    "lockstep": {"additional_config": {"dllm": {"execution": "sync"}}},
    "preempted": {"num_gpu_blocks_override": 24, "block_size": 32, "max_model_len": 160},
    "chunked": {"max_num_batched_tokens": 160, "enable_chunked_prefill": True},
}
CASES = [
    *((family, mode, 60) for family in FAMILIES for mode in MODES),
    *((family, "asynchronous", 1000) for family in FAMILIES),
]
CASES.remove(("gemma", "fused", 60))


STEPS = ("", "vllm:diffusion_num_denoising_steps")  # of all algorithms, by vLLM's own counter


def counters(running: Engine) -> Counter[tuple[str, str]]:
    """(algorithm, counter) -> its value, see `vllm_dllm.metrics`; and `STEPS`."""
    names = {metric_name(counter): counter for counter in COUNTERS}
    found: Counter[tuple[str, str]] = Counter()
    for metric in running.llm.get_metrics():
        if metric.name in names:
            found[metric.labels["algorithm"], names[metric.name]] = int(metric.value)
        elif metric.name == STEPS[1]:
            found[STEPS] += int(metric.value)
    return found


def counted_in(
    asked: list[Any], answers: list[list[Any]], corruption: Any
) -> Counter[tuple[str, str]]:
    """What the counters must have counted, by the requests' own traces and answers."""
    kinds = {"denoise": "denoising_steps", "commit": "commit_passes", "wait": "waiting_passes"}
    found: Counter[tuple[str, str]] = Counter()
    for (_, options), outputs in zip(asked, answers, strict=True):
        asked_for = options["extra_args"]["diffusion_algorithm"]
        algorithm = get_algorithm(asked_for, corruption)[0].name
        for completion in outputs:
            found[algorithm, "finished_requests"] += 1
            found[algorithm, "generation_tokens"] += len(completion.token_ids)
            for block in completion.diffusion_trace.blocks:
                found.update((algorithm, kinds[each.kind]) for each in block.passes)
                found[algorithm, "blocks"] += 1
            if completion.finish_reason == "error":  # counted as a denoise step, whatever it was
                failed = completion.diffusion_trace.blocks[-1].passes[-1].kind
                found[algorithm, kinds[failed]] -= 1
                found[algorithm, "denoising_steps"] += 1
    return found


def check(prompt: list[int], completion: Any, masked: bool) -> None:
    """A trace is complete, and its parts agree with each other and with the answer."""
    tokens, trace = list(completion.token_ids), completion.diffusion_trace
    assert completion.step_maps == trace.step_maps
    for column in (trace.step_maps, trace.block_indices, trace.probabilities, trace.logprobs):
        assert len(column) == len(tokens)
    for index, token in enumerate(tokens):
        block = trace.blocks[trace.block_indices[index]]
        position = len(prompt) + index - block.start
        events = [event for event in block.events if event.position == position]
        deciding = [event for event in events if event.token is not None][-1:]
        assert deciding == events[-1:], "nothing comes behind the decision"
        (event,) = deciding
        assert (event.token, event.step) == (token, trace.step_maps[index])
        steps_of_block = sum(each.kind == "denoise" for each in block.passes)
        assert 1 <= event.step <= steps_of_block
        assert 0 <= event.probability <= 1.0001
        # Noise may turn into its last token before the canvas is finished, whose logprobs are told.
        if completion.logprobs is not None and (masked or event.step == steps_of_block):
            assert trace.logprobs[index] == completion.logprobs[index][token].logprob
    for block in trace.blocks:
        denoised = [each.step for each in block.passes if each.kind == "denoise"]
        assert denoised == list(range(1, len(denoised) + 1))
        clocks = [each.engine_step for each in block.passes]
        assert clocks == sorted(set(clocks)), "one pass in a step"
    if not hasattr(completion, "diffusion_replay"):
        return
    replay = completion.diffusion_replay
    assert replay.dllm_stop_length == len(tokens)
    assert replay.dllm_replay_token_ids[: len(tokens)] == tokens
    assert replay.dllm_replay_step_maps[: len(tokens)] == completion.step_maps
    end = len(prompt) + len(replay.dllm_replay_token_ids)
    assert end == trace.blocks[-1].end
    assert len(replay.dllm_replay_token_ids) == len(replay.dllm_replay_step_maps)
    assert all(step > 0 for step in replay.dllm_replay_step_maps)


@pytest.mark.parametrize(("family", "mode", "count"), long_but([("llada2", "plain", 60)], CASES))
def test_mixed_requests(family: str, mode: str, count: int) -> None:
    path, length, _, _ = FAMILIES[family]
    options: dict[str, Any] = {"max_num_seqs": 24, "disable_log_stats": False} | MODES[mode]
    if family == "gemma":
        options |= TEXT_ONLY_OPTIONS
        if mode == "preempted":  # its windows have pages of their own
            options["num_gpu_blocks_override"] = 44
    asked = list(mixed(family, count))
    with engine(path, length, **options) as running:
        preempted = count_calls(running.scheduler, "_preempt_request")
        plain = completions(running, asked, {})
        before = counters(running)
        traced = completions(running, asked, TRACED)
        counts = Counter({key: n - before[key] for key, n in counters(running).items()})
        running.assert_idle()
        assert not running.scheduler.recorder._kept
    kinds: Counter[str] = Counter()
    for (prompt, _), without, outputs in zip(asked, plain, traced, strict=True):
        assert [o.token_ids for o in without] == [o.token_ids for o in outputs]
        assert not hasattr(without[0], "diffusion_trace")
        for completion in outputs:
            check(prompt, completion, masked=family != "gemma")
            kinds.update(p.kind for b in completion.diffusion_trace.blocks for p in b.passes)
    assert bool(preempted) == (mode == "preempted")
    if mode == "lockstep":
        assert kinds["wait"]
    if not preempted:  # a canvas that begins again has its last attempt in the trace
        # vLLM counts every pass over a canvas, those that wait or commit, too.
        assert sum(kinds.values()) == counts.pop(STEPS), kinds
        check_counts(counts, counted_in(asked, traced, FAMILIES[family][3]))


def check_counts(counted: Counter[tuple[str, str]], expected: Counter[tuple[str, str]]) -> None:
    """Every counter of every algorithm is the sum over its requests, exactly."""
    algorithms = {algorithm for algorithm, _ in expected}
    assert len(algorithms) > 2 or algorithms == {"EntropyBound"}, "the only one for noise"
    for algorithm in {algorithm for algorithm, _ in counted}:
        for counter in COUNTERS:
            own, sums = counted[algorithm, counter], expected[algorithm, counter]
            if counter == "committed_tokens":
                # What leaves behind an answer's end is committed, too.
                assert own >= expected[algorithm, "generation_tokens"]
            elif counter == "blocks":
                # An answer whose prefix is streamed may end before its last block leaves.
                assert own <= sums
            else:
                assert own == sums, (algorithm, counter)


def test_what_is_not_asked_for_is_not_there() -> None:
    attributes = {
        "diffusion_return_step_maps": "step_maps",
        "diffusion_trace": "diffusion_trace",
        "diffusion_replay": "diffusion_replay",
    }
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_args": {}}
    with engine(TINY_LLADA2, 32) as running:
        ((prompt, _),) = mixed("llada2", 1)
        for name, attribute in attributes.items():
            ((completion,),) = completions(running, [(prompt, options)], {name: True})
            assert [a for a in attributes.values() if hasattr(completion, a)] == [attribute]
            assert completion.logprobs is None


@pytest.mark.long
def test_a_constrained_canvas_that_waits_needs_no_path() -> None:
    """In lockstep, one request ended with an error while it waited for the others."""
    asked = list(mixed("gemma", 27))
    found = []
    for execution in ("fdfo", "sync"):
        options = {"additional_config": {"dllm": {"execution": execution}}, **TEXT_ONLY_OPTIONS}
        with engine(TINY_GEMMA, 32, max_num_seqs=24, **options) as running:
            found.append(completions(running, asked, {}))
    free, lockstep = ([[list(o.token_ids) for o in each] for each in outputs] for outputs in found)
    constrained = [n for n, (_, options) in enumerate(asked) if "regex" in options]
    assert len(constrained) >= 3
    assert [lockstep[n] for n in constrained] == [free[n] for n in constrained]
    assert all(free[n] != [[]] for n in constrained)
    assert {o.finish_reason for each in found[1] for o in each} <= {"stop", "length"}


# ---- Logprobs

LIMIT = 1e-4  # of a replayed logprob in float32


def reads_no_rows(family: str, options: dict[str, Any]) -> bool:
    """Whether the logprob of a chosen token follows from what its algorithm reads."""
    if {"regex", "presence_penalty"} & options.keys():
        return False
    if options["extra_args"]["diffusion_algorithm"] == "Credit":
        return False
    return family != "gemma" or (options["temperature"] > 0 and "top_p" not in options)


def varied(family: str, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Mixed requests; some with a filter and some with a bias, none with `n` or logprobs."""
    found = []
    for index, (prompt, options) in enumerate(mixed(family, count)):
        kept = {key: value for key, value in options.items() if key not in ("logprobs", "n")}
        if kept["temperature"] > 0 and index % 2:
            kept |= {"top_p": 0.8, "top_k": 20}
        if index % 5 == 0 and "regex" not in kept:
            kept["presence_penalty"] = 0.5
        found.append((prompt, kept))
    return found


@pytest.mark.parametrize("family", long_but(["llada2"], FAMILIES))
def test_logprobs_are_those_that_a_request_gets(family: str) -> None:
    """Also where they are the logarithm of what the algorithm has read, and no rows of logits are.

    A float32 probability is the true one up to some roundings of 2^-24, and so is its logarithm.
    """
    path, length, _, _ = FAMILIES[family]
    asked = varied(family, 40)
    reported = [(prompt, options | {"logprobs": 0}) for prompt, options in asked]
    only = {"diffusion_trace": True}
    text_only = TEXT_ONLY_OPTIONS if family == "gemma" else {}
    with engine(path, length, max_num_seqs=24, **text_only) as running:
        captured = count_calls(running.runner.model_state.parts.logprobs, "capture")
        completions(running, [one for one in asked if reads_no_rows(family, one[1])], only)
        assert not captured, "no rows of logits"
        light = completions(running, asked, only)
        heavy = completions(running, reported, only)
    for (one,), (other,) in zip(light, heavy, strict=True):
        mine, theirs = one.diffusion_trace, other.diffusion_trace
        assert one.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-6)
        assert mine.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)


def replayed(
    prompt: list[int],
    replay: Any,
    length: int,
    mask: int,
    logits: Callable[[list[int]], torch.Tensor],
) -> list[float]:
    """The logprob of each token of the rollout, from its ids and its step map alone."""
    ids = prompt + replay.dllm_replay_token_ids
    steps = [0] * len(prompt) + replay.dllm_replay_step_maps
    assert len(ids) % length == 0, "whole blocks"
    found = [0.0] * len(ids)
    for start in range(0, len(ids), length):
        block = range(start, start + length)
        for step in sorted({steps[at] for at in block} - {0}):
            canvas = [ids[at] if steps[at] < step else mask for at in block]
            with torch.no_grad():
                scores = logits(ids[:start] + canvas)[start:].log_softmax(-1)
            for at in block:
                if steps[at] == step:
                    found[at] = float(scores[at - start, ids[at]])
    return found[len(prompt) :]


@pytest.mark.parametrize("family", ["llada2", pytest.param("sdar", marks=pytest.mark.long)])
def test_replay(family: str) -> None:
    """A plain model finds every decision and its logprob again, without cache or batch.

    The models are `transformers`' Qwen3 under SDAR's mask, and the test suite's own LLaDA2. They
    read the canvas as it was before each step, which follows from the trace alone.
    """
    path, length, tokenizer, _ = FAMILIES[family]
    mask = tokenizer().mask_token_id
    logits = (
        reference_llada2.Reference.load(path, length, mask).logits
        if family == "llada2"
        else reference_sdar.Reference(path).logits
    )
    encoder = Encoder(tokenizer())
    prompts = [encoder(problem).prompt for problem in held_out_set(3)]
    names = ("LowConfidence", "LowConfidenceDynamic", "Sequential", "EntropyBounded")
    wanted = {"diffusion_trace": True, "diffusion_replay": True}
    asked = [
        (
            prompt,
            {"max_tokens": 30, "temperature": temperature, "seed": index}
            | {"extra_args": {"diffusion_algorithm": names[index % len(names)]}},
        )
        for temperature in (0.0, 0.8)
        for index, prompt in enumerate(prompts)
    ]
    with engine(path, length, max_num_seqs=64) as running:
        found = completions(running, asked, wanted)
    decided = 0
    for (prompt, _), (completion,) in zip(asked, found, strict=True):
        again = replayed(prompt, completion.diffusion_replay, length, mask, logits)
        recorded = [
            event.logprob
            for block in completion.diffusion_trace.blocks
            for _, event in sorted(block.deciding().items())
            if event.step
        ]
        assert torch.tensor(recorded) == pytest.approx(torch.tensor(again), abs=LIMIT)
        assert completion.diffusion_trace.logprobs == recorded[: len(completion.token_ids)]
        decided += len(recorded)
    assert decided > 500
