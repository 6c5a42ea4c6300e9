"""Prefill of long prompts: chunks of many blocks in one pass, against block by block.

    OMP_NUM_THREADS=2 .venv/bin/python benchmarks/prefill.py --json benchmarks/results/prefill.json

One LLaDA2 engine runs in this process, without prefix caching, one request at a time. Three ways
are timed in turn, round after round:

- `whole`: the prompt in one step. It is block-causal: a block sees itself and what is before it.
- `block by block`: the same engine with the scheduler's token budget at one block, so that each
  step prefills one. (vLLM's `long_prefill_token_threshold` does not bind a lone request.)
- `fixed context`: a chunk of as many tokens in one step that is centred on position M, behind a
  prefix that is already there. Its queries see M keys on average, however long the chunk is, so
  that attention does not grow with it; in `whole` they see half the prompt's length.

Only the engine's prefill steps are timed. Before the clock starts, all ways of cutting a prompt
must give the same tokens with the same log-probabilities.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from benchmarks.common import engines_in_this_process, write  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402

MODEL = TINY_LLADA2
LENGTHS = (128, 256, 512, 1024, 1536, 2048)
WHOLE, BLOCKS, FIXED = "whole", "block by block", "fixed context"
# For a log-probability: another way of cutting adds in another order, in float32.
TOLERANCE = 1e-3
# Tokens of context for the answers that are compared.
ROOM = 256


class WrongAnswerError(RuntimeError):
    """Two ways of prefilling one prompt do not agree."""


@dataclass(frozen=True)
class Cut:
    """A prompt that is cut into prefill steps.

    Attributes:
        prompt: its token ids.
        before: tokens of a first chunk that is not timed, a multiple of the block; or 0.
        chunks: tokens of each timed step. With `before` they make up the prompt.
    """

    prompt: tuple[int, ...]
    before: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The token ids that follow a prompt, and the log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Prefill:
    """A real engine that is stepped by hand."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.block: int = self.scheduler.block_length
        self.budget: int = self.scheduler.max_num_scheduled_tokens
        self.requests = 0

    def answer(self, cut: Cut, tokens: int) -> Answer:
        """The `tokens` tokens that follow when the prompt is prefilled like this."""
        self._prefill(cut, tokens, logprobs=0)
        while True:
            for output in self.engine.step():
                if output.finished:
                    (completion,) = output.outputs
                    places = zip(completion.token_ids, completion.logprobs, strict=True)
                    values = tuple(float(place[token].logprob) for token, place in places)
                    return Answer(tuple(completion.token_ids), values)

    def seconds(self, cut: Cut) -> float:
        """Seconds of the timed steps of a prefill; the request ends before it decodes anything."""
        name, took = self._prefill(cut, 1, logprobs=None)
        self.engine.abort_request([name])
        self.engine.step()
        return took

    def _prefill(self, cut: Cut, tokens: int, logprobs: int | None) -> tuple[str, float]:
        """Name of the request, and seconds of its timed prefill steps."""
        from vllm import SamplingParams

        options = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        params = SamplingParams(**options, logprobs=logprobs)
        self.requests += 1
        name = str(self.requests)
        self.engine.add_request(name, {"prompt_token_ids": list(cut.prompt)}, params)
        (request,) = self.scheduler.requests.values()
        if cut.before:
            self._step(request, cut.before)
        begin = time.perf_counter()
        for chunk in cut.chunks:
            self._step(request, chunk)
        took = time.perf_counter() - begin
        if request.num_computed_tokens != len(cut.prompt):
            raise WrongAnswerError(f"{request.num_computed_tokens} tokens were prefilled")
        self.scheduler.max_num_scheduled_tokens = self.budget
        return name, took

    def _step(self, request: Any, chunk: int) -> None:
        """One step of the engine, which must prefill `chunk` tokens."""
        done = request.num_computed_tokens
        self.scheduler.max_num_scheduled_tokens = chunk
        self.engine.step()
        if request.num_computed_tokens != done + chunk or request.num_output_tokens:
            raise WrongAnswerError(
                f"a step was to prefill {chunk} tokens behind {done}, and left the request at "
                f"{request.num_computed_tokens}"
            )


def cuts(length: int, middle: int, block: int) -> dict[str, Cut]:
    """The three ways for `length` tokens; `middle` is M, in tokens."""
    before = (middle - length // 2) // block * block
    prompt = made_up(length)
    return {
        WHOLE: Cut(prompt, 0, (length,)),
        BLOCKS: Cut(prompt, 0, (block,) * (length // block)),
        FIXED: Cut(made_up(before + length), before, (length,)),
    }


def made_up(length: int) -> tuple[int, ...]:
    """A prompt of printable bytes, the same for each length in every run."""
    draw = random.Random(length)
    return tuple(draw.randrange(32, 127) for _ in range(length))


def check_same(label: str, first: Answer, second: Answer) -> None:
    """Refuse answers that differ.

    Raises:
        WrongAnswerError: other tokens, or a log-probability that is off by more than `TOLERANCE`.
    """
    if first.tokens != second.tokens:
        raise WrongAnswerError(f"{label}: {first.tokens} and {second.tokens}")
    for first_value, second_value in zip(first.logprobs, second.logprobs, strict=True):
        if not abs(first_value - second_value) <= TOLERANCE:  # NaN is refused, too
            raise WrongAnswerError(
                f"{label}: a token's log-probability is {first_value} and {second_value}"
            )


def check(runs: Prefill, ways: Mapping[str, Cut]) -> None:
    """Check that all ways answer as the whole prompt does, over two canvases."""
    for name in (BLOCKS, FIXED):
        cut = ways[name]
        whole = Cut(cut.prompt, 0, (len(cut.prompt),))
        answers = [runs.answer(variant, 2 * runs.block) for variant in (whole, cut)]
        check_same(f"{len(cut.prompt)} tokens, {name}", *answers)


def measure(
    runs: Prefill, lengths: Sequence[int], middle: int, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each repeat, by way and length; the answers are checked first."""
    ways = {length: cuts(length, middle, runs.block) for length in lengths}
    for length in tqdm(lengths, desc="the same answers", unit="length", leave=False):
        check(runs, ways[length])
    samples = {name: {str(n): list[float]() for n in lengths} for name in (WHOLE, BLOCKS, FIXED)}
    for _ in tqdm(range(repeats), desc="rounds", leave=False):
        for length in lengths:
            for name, cut in ways[length].items():
                samples[name][str(length)].append(1e3 * runs.seconds(cut))
    return samples


def figures(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Minimum and median of each way and length; fits of the minima; the gain.

    The gain is `block by block` over `whole`, of the minima. Its median is that of the rounds'
    own gains, which compare steps that ran within a second of each other.
    """
    ways = {
        name: {
            length: {"min_ms": min(t), "median_ms": statistics.median(t), "samples_ms": list(t)}
            for length, t in by_length.items()
        }
        for name, by_length in samples.items()
    }
    least = {
        name: {length: min(times) for length, times in by_length.items()}
        for name, by_length in samples.items()
    }
    rounds = {
        length: [slow / fast for slow, fast in zip(samples[BLOCKS][length], times, strict=True)]
        for length, times in samples[WHOLE].items()
    }
    return {
        "ways": ways,
        "fits": {name: fit(by_length) for name, by_length in least.items()},
        "gain": {length: least[BLOCKS][length] / ms for length, ms in least[WHOLE].items()},
        "gain_median": {length: statistics.median(gains) for length, gains in rounds.items()},
    }


def fit(ms: Mapping[str, float]) -> dict[str, Any] | None:
    """How time grows with the length, by least squares; None for a single length.

    `exponent` is p of ms = c * length^p, of the logarithms. `line` are a and b of
    ms = a + b * length / 1000: a step's fixed cost makes p smaller than 1.
    """
    if len(ms) < 2:
        return None
    lengths, times = [int(length) for length in ms], list(ms.values())
    power = statistics.linear_regression(*(list(map(math.log, v)) for v in (lengths, times)))
    slope, intercept = statistics.linear_regression(lengths, times)
    return {"exponent": power.slope, "line": [intercept, 1e3 * slope]}


def start(model: Path, lengths: Sequence[int], middle: int) -> Any:
    """The engine: one request, a step and a context that hold the longest prompt there is."""
    engines_in_this_process()
    from vllm import LLM

    longest = middle + max(lengths) + ROOM
    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest,
        # vLLM's own means against a checkpoint whose context is shorter.
        hf_overrides={"max_position_embeddings": longest},
        max_num_seqs=1,
        max_num_batched_tokens=longest,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


def show(results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table."""
    ways = results["ways"]
    yield f"{'tokens':>8}" + "".join(f"{name + ', ms':>22}" for name in ways) + f"{'gain':>8}"
    for length, gain in results["gain"].items():
        cells = (by_length[length] for by_length in ways.values())
        times = (f"{c['min_ms']:.1f} ({c['median_ms']:.1f})" for c in cells)
        yield f"{length:>8}" + "".join(f"{time:>22}" for time in times) + f"{gain:7.2f}x"
    for name, fitted in results["fits"].items():
        if fitted:
            fixed, slope = fitted["line"]
            power = f"ms ~ tokens^{fitted['exponent']:.2f}"
            yield f"{name}: {power}, or {fixed:.1f} ms + {slope:.1f} ms per 1,000 tokens"
    yield "minimum (median) of the repeats; gain: block by block over whole, of the minima"
    rounds = (f"{length}: {gain:.2f}x" for length, gain in results["gain_median"].items())
    yield f"median of the rounds' gains: {', '.join(rounds)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a LLaDA2 checkpoint")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--middle", type=int, help="M, in tokens; default: the longest length")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    lengths = sorted(set(args.lengths))
    middle = args.middle or max(lengths)
    runs = Prefill(start(args.model, lengths, middle))
    if any(length < 1 or length % runs.block for length in lengths) or 2 * middle < max(lengths):
        parser.error(f"lengths are multiples of the block, {runs.block}, and at most twice M")
    results = figures(measure(runs, lengths, middle, args.repeats))
    print("\n".join(show(results)))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    setting = {"model": args.model.name, "block": runs.block, "middle": middle}
    write(args.json, "prefill", setting | results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
