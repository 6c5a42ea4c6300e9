"""What does a constrained step cost an engine, beside an unconstrained one?

    .venv/bin/python benchmarks/constrained_steps.py --json OUT

A small LLaDA2 serves 16 requests (`--requests`) on a CPU, in this process: without constraints,
with one tool call for all, and with a different schema for each. Each request decides one token a
step, so the steps of the first canvas go from all of its positions free to one. The three kinds of
requests take turns. The figures are means over the steps of a canvas, in milliseconds of CPU and of
wall time. There are two vocabularies: that of the tiny checkpoint, and 151,936 ids with made-up
weights. The tiny body takes next to no time; `--hidden 2048` gives the large one the width of
LLaDA2.0-mini, and `--steps` says how many steps of a canvas are timed.

    .venv/bin/python benchmarks/constrained_steps.py --new-canvases --eager --schemas FILE

With `--new-canvases` the 16 requests follow 16 real schemas of 151,936 ids; their canvases begin
in different steps; the file is gzipped and has a ``schema`` and its ``group`` in each line. The
figures are the median step, the longest one relative to it, the longest one in which a canvas
begins, and how long those were held for that, in milliseconds. CPU time is that of the engine's
thread. With `--in-step` steps find the parts of constraints, as they do with several ranks.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

import numpy as np  # noqa: E402
from canvas_grammar.automaton.vocabulary import byte_level_alphabet  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from tests.support.checkpoints import TINY_LLADA2  # noqa: E402

IDS, LENGTH, CONTEXT, ROOM = 151_936, 32, 64, 512
KINDS = ("none", "one tool call", "different schemas")
TINY, LARGE = "272 tokens", "151,936 tokens"
REAL = ROOT.parent / "shared" / "json_schemas" / "schemas.jsonl.gz"
STRING = {"type": "string"}
CALL = {
    "name": {"enum": ["get_weather"]},
    "parameters": {
        "type": "object",
        "properties": {"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
}
TOOL_CALL = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1,
    "items": {"type": "object", "anyOf": [{"properties": CALL, "required": list(CALL)}]},
}


def real_tokens() -> list[bytes]:
    """Tokens of a real byte-level vocabulary, or pieces of bytes where there is none."""
    package = util.find_spec("mistral_common")
    path = Path(package.origin or "").parent / "data" / "tekken_240911.json" if package else Path()
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        return [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, size=149_744)
    letters = rng.choice(np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ABC,.0", np.uint8), sizes.sum())
    pieces = np.split(letters, sizes.cumsum()[:-1])
    return [*(bytes([byte]) for byte in range(256)), *(piece.tobytes() for piece in pieces)]


def different_schemas(count: int) -> list[dict[str, Any]]:
    """Records with other names, lengths and numbers of fields each."""
    return [
        {
            "type": "object",
            "properties": {
                f"name_{n}": STRING if n % 2 else {"type": "string", "maxLength": 10 + n},
                f"age_{n}": {"type": "integer", "minimum": 0, "maximum": 100 + n},
                **{f"flag_{n}_{k}": {"type": "boolean"} for k in range(n % 4)},
            },
            "required": [f"name_{n}", f"age_{n}"],
        }
        for n in range(count)
    ]


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


def start(model: Path, eager: bool, requests: int) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format="auto" if model == TINY_LLADA2 else "dummy",
        dtype="float32",
        enforce_eager=eager,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=CONTEXT + ROOM,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        additional_config={"dllm": {"passes_per_step": 1}},
    )


def schemas(kind: str, requests: int) -> list[Any]:
    """What each of the requests is constrained by, or None."""
    if kind == KINDS[0]:
        return [None] * requests
    if kind == KINDS[1]:
        return [TOOL_CALL] * requests
    return list(different_schemas(requests))


def canvas(llm: Any, kind: str, requests: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of CPU and wall time of the steps of the first canvas of all requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine, names = llm.llm_engine, [f"{kind}-{n}" for n in range(requests)]
    scheduler = engine.engine_core.engine_core.scheduler
    for number, (name, schema) in enumerate(zip(names, schemas(kind, requests), strict=True)):
        options: dict[str, Any] = {"ignore_eos": True}
        if schema is not None:
            options = {"structured_outputs": StructuredOutputsParams(json=schema)}
        params = SamplingParams(
            temperature=0, max_tokens=ROOM, extra_args={"diffusion_threshold": 2.0}, **options
        )
        ids = [20 + (7 * number + i) % 200 for i in range(CONTEXT)]
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    while len(scheduler.running) < requests or any(
        one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running
    ):
        engine.step()
    cpu, wall = [], []
    for _ in range(steps):
        begin, used = time.perf_counter(), time.process_time()
        engine.step()
        cpu.append(1e3 * (time.process_time() - used))
        wall.append(1e3 * (time.perf_counter() - begin))
    if len(scheduler.running) != requests:
        raise RuntimeError("a request ended before its first canvas")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return cpu, wall


def compared(llm: Any, rounds: int, requests: int, steps: int) -> dict[str, Any]:
    """The mean step of each kind, and the median over the rounds of its ratio to no constraint."""
    for kind in KINDS:
        canvas(llm, kind, requests, steps)  # compiles constraints and kernels
    found: dict[str, dict[str, list[float]]] = {k: {"cpu_ms": [], "wall_ms": []} for k in KINDS}
    free: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            cpu, wall = canvas(llm, kind, requests, steps)
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


def real_schemas(path: Path) -> Iterator[Any]:
    """One of each group, then another one of each."""
    groups: dict[str, list[Any]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            groups.setdefault(entry["group"], []).append(entry["schema"])
    every = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return (schema for schema in every if isinstance(schema, dict))


def new_canvases(llm: Any, args: argparse.Namespace, constrained: bool) -> dict[str, Any]:
    """See the module's docstring; without constraints, only the steps."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_dllm.engine.constraints import Constraints

    engine, schemas = llm.llm_engine, real_schemas(args.schemas)
    scheduler = engine.engine_core.engine_core.scheduler
    worker = engine.model_executor.driver_worker.worker
    parts = worker.model_runner.model_state.parts
    if args.in_step:
        parts.constraints._explorer = None
    held, begun, names = [0.0], [0], []
    begin_canvases, follow = Constraints._begin_canvases, Constraints._follow

    def timed(self: Any, *arguments: Any) -> None:
        begin = time.perf_counter()
        begin_canvases(self, *arguments)
        held[-1] += 1e3 * (time.perf_counter() - begin)

    def counted(self: Any, *arguments: Any) -> None:
        begun[-1] += 1
        follow(self, *arguments)

    Constraints._begin_canvases, Constraints._follow = timed, counted  # type: ignore[method-assign]
    while len(names) < args.requests:
        options: dict[str, Any] = {"ignore_eos": True}
        if constrained:
            options = {"structured_outputs": StructuredOutputsParams(json=next(schemas))}
        params = SamplingParams(
            temperature=0, max_tokens=ROOM, extra_args={"diffusion_threshold": 2.0}, **options
        )
        count = CONTEXT - LENGTH * len(names) // args.requests  # so that canvases begin in turn
        try:
            engine.add_request(f"{len(names)}", {"prompt_token_ids": [20] * count}, params)
        except VLLMValidationError:  # this schema is refused
            continue
        names.append(f"{len(names)}")
    while len(scheduler.running) < args.requests:
        engine.step()
    while constrained and len(parts.constraints.parts) < args.requests:
        engine.step()
    wall, cpu = [], []
    for _ in range(args.steps):
        held.append(0.0)
        begun.append(0)
        begin, used = time.perf_counter(), time.thread_time()
        engine.step()
        cpu.append(1e3 * (time.thread_time() - used))
        wall.append(1e3 * (time.perf_counter() - begin))
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    Constraints._begin_canvases, Constraints._follow = begin_canvases, follow  # type: ignore[method-assign]
    new = [n for n, count in enumerate(begun[-args.steps :]) if count]
    found: dict[str, Any] = {"steps": len(wall), "canvases": sum(begun[-args.steps :])}
    for name, of in ("wall_ms", wall), ("cpu_ms", cpu):
        median = statistics.median(of)
        begins = max((of[n] / median for n in new), default=None)
        found[name] = {"median": median, "most": max(of) / median, "most_that_begins": begins}
    if new:
        ms = [held[-args.steps :][n] for n in new]
        found["held_ms"] = {"median": statistics.median(ms), "most": max(ms)}
    return found


def _ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one vocabulary."""
    with tempfile.TemporaryDirectory() as scratch:
        model = TINY_LLADA2
        if args.child == LARGE:
            model = Path(scratch) / "model"
            write_large(model, args.hidden)
        llm = start(model, args.eager, args.requests)
        if args.new_canvases:
            canvas(llm, KINDS[2], args.requests, 4)  # compiles kernels
            names = ("none", False), ("16 real schemas", True)
            return {name: new_canvases(llm, args, follow) for name, follow in names}
        return compared(llm, args.rounds, args.requests, args.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabularies", nargs="+", choices=(TINY, LARGE), default=(TINY, LARGE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=LENGTH - 2, help="of each canvas")
    parser.add_argument("--hidden", type=int, help="the width of the model with 151,936 ids")
    parser.add_argument("--eager", action="store_true", help="without compiled kernels")
    parser.add_argument("--new-canvases", action="store_true", help="see above")
    parser.add_argument("--in-step", action="store_true", help="see above")
    parser.add_argument("--schemas", type=Path, default=REAL)
    parser.add_argument("--child", choices=(TINY, LARGE), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.new_canvases and not args.schemas.is_file():
        parser.error(f"no schemas in {args.schemas}: --schemas takes gzipped JSON lines of them")
    if args.child:
        print(json.dumps(measured(args)))
        return
    flags = ["--rounds", args.rounds, "--requests", args.requests, "--steps", args.steps]
    flags += ["--hidden", args.hidden] if args.hidden else []
    flags += ["--eager"] * args.eager + ["--in-step"] * args.in_step
    flags += ["--schemas", args.schemas]
    if args.new_canvases:
        args.vocabularies, flags = [LARGE], [*flags, "--new-canvases"]
    results = {}
    for name in args.vocabularies:
        results[name] = child(__file__, "--child", name, *map(str, flags))
        print(name, json.dumps(results[name], indent=1), flush=True)
    write(args.json, "constrained_steps", results)


if __name__ == "__main__":
    main()
