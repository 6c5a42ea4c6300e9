"""What does a constrained step cost an engine, beside an unconstrained one?

    .venv/bin/python benchmarks/constrained_steps.py --json OUT

A small LLaDA2 serves 16 requests on a CPU, in this process: without constraints, with one tool call
for all, and with 16 different schemas. Each request decides one token a step, so the steps of the
first canvas go from all of its positions free to one. The three kinds of requests take turns. The
figures are means over the steps of a canvas, in milliseconds of CPU and of wall time. There are two
vocabularies: that of the tiny checkpoint, and 151,936 ids with made-up weights. The tiny body takes
next to no time; `--hidden 2048` gives the large one the width of LLaDA2.0-mini, and `--steps` says
how many steps of a canvas are timed.

`--hostile` compares the steps of requests without constraints with nothing beside them and while
one client sends a new schema every second that takes all the CPU time a compilation may have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

import numpy as np  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from benchmarks.constraint_batches import IDS, different_schemas  # noqa: E402
from benchmarks.constraints import CONSTRAINTS, real_tokens  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402
from vllm_dllm.constraints.automaton.compilation import Constraint  # noqa: E402
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary, byte_level_alphabet  # noqa: E402
from vllm_dllm.constraints.service.pool import CompilerPool  # noqa: E402
from vllm_dllm.constraints.service.turns import Client  # noqa: E402

LENGTH, CONTEXT, ROOM, REQUESTS = 32, 64, 512, 16
KINDS = ("none", "16 times one tool call", "16 schemas")
TINY, LARGE = "272 tokens", "151,936 tokens"


def write_large(path: Path, hidden: int | None) -> None:
    """The tiny checkpoint's configuration with 151,936 ids, for weights that vLLM makes up."""
    path.mkdir()
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    words = ["".join(spelled[byte] for byte in token) for token in real_tokens()]
    words = list(dict.fromkeys(word for word in words if word))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{n}|>" for n in range(IDS - len(words))])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((TINY_LLADA2 / "config.json").read_text())
    config |= {"vocab_size": IDS, "mask_token_id": IDS - 1}
    if hidden is not None:
        config["hidden_size"] = hidden
    ends = {"bos_token_id": IDS - 2, "eos_token_id": IDS - 3, "pad_token_id": IDS - 3}
    (path / "config.json").write_text(json.dumps(config | ends))
    (path / "generation_config.json").write_text(json.dumps(ends))
    end = f"<|special_{IDS - 3 - len(words)}|>"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (path / "tokenizer_config.json").write_text(json.dumps(named))


def start(model: Path, eager: bool) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format="auto" if model == TINY_LLADA2 else "dummy",
        dtype="float32",
        enforce_eager=eager,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=CONTEXT + ROOM,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
    )


def schemas(kind: str) -> list[Any]:
    """What each of the requests is constrained by, or None."""
    if kind == KINDS[0]:
        return [None] * REQUESTS
    if kind == KINDS[1]:
        return [CONSTRAINTS["tool call"][1]] * REQUESTS
    return list(different_schemas(REQUESTS))


def canvas(llm: Any, kind: str, count: int = LENGTH - 2) -> tuple[list[float], list[float]]:
    """Milliseconds of CPU and wall time of the steps of the first canvas of all requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine, names = llm.llm_engine, [f"{kind}-{n}" for n in range(REQUESTS)]
    scheduler = engine.engine_core.engine_core.scheduler
    for number, (name, schema) in enumerate(zip(names, schemas(kind), strict=True)):
        options: dict[str, Any] = {"ignore_eos": True}
        if schema is not None:
            options = {"structured_outputs": StructuredOutputsParams(json=schema)}
        params = SamplingParams(
            temperature=0, max_tokens=ROOM, extra_args={"diffusion_threshold": 2.0}, **options
        )
        ids = [20 + (7 * number + i) % 200 for i in range(CONTEXT)]
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    while len(scheduler.running) < REQUESTS or any(
        one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running
    ):
        engine.step()
    cpu, wall = [], []
    for _ in range(count):
        begin, used = time.perf_counter(), time.process_time()
        engine.step()
        cpu.append(1e3 * (time.process_time() - used))
        wall.append(1e3 * (time.perf_counter() - begin))
    if len(scheduler.running) != REQUESTS:
        raise RuntimeError("a request ended before its first canvas")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return cpu, wall


def compared(llm: Any, rounds: int, steps: int) -> dict[str, Any]:
    """The mean step of each kind, and the median over the rounds of its ratio to no constraint."""
    for kind in KINDS:
        canvas(llm, kind, steps)  # compiles constraints and kernels
    found: dict[str, dict[str, list[float]]] = {k: {"cpu_ms": [], "wall_ms": []} for k in KINDS}
    free: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            cpu, wall = canvas(llm, kind, steps)
            found[kind]["cpu_ms"].append(statistics.fmean(cpu))
            found[kind]["wall_ms"].append(statistics.fmean(wall))
            free[kind].append(statistics.fmean(cpu[:4]))
    return {
        kind: {
            **{name: statistics.median(values) for name, values in of.items()},
            "cpu_ratio": _ratio(of["cpu_ms"], found[KINDS[0]]["cpu_ms"]),
            "wall_ratio": _ratio(of["wall_ms"], found[KINDS[0]]["wall_ms"]),
            "first_steps_cpu_ms": statistics.median(free[kind]),
            "first_steps_cpu_ratio": _ratio(free[kind], free[KINDS[0]]),
        }
        for kind, of in found.items()
    }


def _ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def hostile_schema(number: int) -> dict[str, Any]:
    """One that takes all the CPU time that a compilation may have; each number another one."""
    slow = {"type": "string", "pattern": "^(.*17.{9}[ab].{9}[cd].{9}|x)*$"}
    return {"type": "object", "properties": {f"field_{number}": slow}}


@contextmanager
def hostile_client(pool: CompilerPool, refusals: list[str]) -> Iterator[None]:
    """Sends a hostile schema every second."""
    stop = threading.Event()

    def send() -> None:
        client: Client = ("203.0.113.7", "")
        for number in range(1, 1 << 30):
            if stop.is_set():
                return
            schema = hostile_schema(int(time.time() * 1e3) + number)
            pool.submit(Constraint.of("json_schema", schema), client).add_done_callback(
                lambda done: refusals.append(str(done.exception()))
            )
            stop.wait(1.0)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def beside_hostile(llm: Any, pool: CompilerPool, turns: int) -> dict[str, Any]:
    """Percentiles of a step with and without a hostile client, by turns of ten seconds."""
    canvas(llm, KINDS[0])
    pool.warm()
    alone: list[float] = []
    beside: list[float] = []
    refusals: list[str] = []
    ratios: list[float] = []
    for _ in range(turns):
        calm = _steps_of(llm, 10.0)
        with hostile_client(pool, refusals):
            time.sleep(1.0)
            disturbed = _steps_of(llm, 10.0)
        time.sleep(3.0)
        alone += calm
        beside += disturbed
        ratios.append(_p99(disturbed) / _p99(calm))
    if "None" in refusals or not refusals:
        raise RuntimeError("the hostile schemas are not refused")
    return {
        "steps": [len(alone), len(beside)],
        "median_ms": [statistics.median(alone), statistics.median(beside)],
        "p99_ms": [_p99(alone), _p99(beside)],
        "ratio_p99": _p99(beside) / _p99(alone),
        "ratios_of_turns": ratios,
        "answers": sorted({text[:90] for text in refusals}),
    }


def _steps_of(llm: Any, seconds: float) -> list[float]:
    found, until = list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        found += canvas(llm, KINDS[0])[1]
    return found


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one vocabulary."""
    with tempfile.TemporaryDirectory() as scratch:
        model = TINY_LLADA2
        if args.child == LARGE:
            model = Path(scratch) / "model"
            write_large(model, args.hidden)
        llm = start(model, args.eager)
        if not args.hostile:
            return compared(llm, args.rounds, args.steps)
        config = json.loads((model / "config.json").read_text())
        vocabulary = Vocabulary.read(
            (model / "tokenizer.json").read_text("utf-8"),
            config["vocab_size"],
            [config["eos_token_id"]],
        )
        pool = CompilerPool(vocabulary)
        try:
            return beside_hostile(llm, pool, args.rounds)
        finally:
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabularies", nargs="+", choices=(TINY, LARGE), default=(TINY, LARGE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=LENGTH - 2, help="of each canvas")
    parser.add_argument("--hidden", type=int, help="the width of the model with 151,936 ids")
    parser.add_argument("--eager", action="store_true", help="without compiled kernels")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--child", choices=(TINY, LARGE), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(args)))
        return
    flags = ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    flags += ["--hidden", str(args.hidden)] if args.hidden else []
    flags += ["--eager"] * args.eager + ["--hostile"] * args.hostile
    results = {}
    for name in args.vocabularies:
        results[name] = child(__file__, "--child", name, *flags)
        print(name, json.dumps(results[name], indent=1), flush=True)
    name = "hostile_steps" if args.hostile else "constrained_steps"
    write(args.json, name, results)


if __name__ == "__main__":
    main()
