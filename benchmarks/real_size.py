"""A denoise step at the published sizes, with made-up weights: against the floor and vLLM's class.

    python benchmarks/real_size.py --json benchmarks/results/real_size.json

This needs a GPU that holds 52 GB of weights; no checkpoint is downloaded. Each system is in a
process of its own with an engine as vLLM has it by default: compiled, with CUDA graphs. Processes
whose weights fit together start at the same time, because a start takes minutes of compilation;
one at a time is timed, while none starts. Each figure is written when it is there.

Every request denoises after `--context` tokens. Nothing converges, so that LLaDA2 decides one token
a step and DiffusionGemma takes all its steps. To try the script on a CPU:

    .venv/bin/python benchmarks/real_size.py --tiny --requests 1 2 --context 40 --steps 20
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, environment, write  # noqa: E402
from benchmarks.published import DIFFUSION_GEMMA, LLADA2_MINI, Geometry  # noqa: E402
from benchmarks.tables import markdown, real_size  # noqa: E402
from tests.support.checkpoints import TINY  # noqa: E402


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: bytes a second, dense operations a second in bfloat16."""

    bandwidth: float
    rate: float


# By a part of the name that PyTorch gives.
CARDS = {"H100": Card(3.35e12, 989e12), "H200": Card(4.8e12, 989e12)}


@dataclass(frozen=True)
class Floor:
    """The bytes and operations of one step; a multiply-add is two operations.

    Attributes:
        weight_bytes, cache_bytes: what is read.
        operations: those in bfloat16.
        float8_operations: those whose weights have one byte, at twice the rate.
    """

    weight_bytes: float
    cache_bytes: float
    operations: float
    float8_operations: float = 0.0

    def milliseconds(self, card: Card) -> float:
        """The least time of the step."""
        read = (self.weight_bytes + self.cache_bytes) / card.bandwidth
        computed = (self.operations + self.float8_operations / 2) / card.rate
        return 1e3 * max(read, computed)


def floor(model: Geometry, requests: int, context: int, width: int = 2) -> Floor:
    """The floor of a step in which `requests` requests denoise, each after `context` tokens.

    Args:
        model: its geometry.
        requests: canvases in the batch.
        context: tokens before each canvas.
        width: bytes of a weight (2 for bfloat16, 1 for float8); heads, embeddings, keys and values
            have 2.
    """
    tokens, hidden = requests * model.canvas, model.hidden
    expert = 3 * hidden * model.width
    touched = model.experts * (1 - (1 - model.chosen / model.experts) ** tokens)
    always = sum(a.layers * a.weights(hidden) for a in model.attention)
    always += sum(3 * hidden * size * layers for size, layers in model.dense.items())
    always += model.moe_layers * hidden * model.experts  # routers
    heads = (2 if model.tied else 1) * hidden * model.vocabulary
    per_token = 2.0 * tokens * (always + model.moe_layers * model.chosen * expert)
    cache = attended = 0.0
    for a in model.attention:
        keys = min(context, a.window or context) + model.canvas
        cache += 2.0 * requests * a.layers * keys * a.kv_heads * a.dim * a.values
        attended += 4.0 * tokens * a.layers * keys * a.heads * a.dim
    return Floor(
        width * (always + model.moe_layers * touched * expert) + 2 * heads,
        cache,
        2.0 * tokens * heads + attended + (per_token if width == 2 else 0.0),
        per_token if width == 1 else 0.0,
    )


MASK = 156895  # of LLaDA2.0's vocabulary
POSITIONS = 32768
PROFILED_STEPS = 20
# Of a system. On an H100 with empty caches the first step came after more than three minutes.
LIMIT_SECONDS = 600.0
# Beside the weights: CUDA's context, activations, graphs, and the pages of 16 requests.
BESIDE_WEIGHTS = 10e9


@dataclass(frozen=True)
class System:
    """A system that is timed.

    Attributes:
        tiny: checkpoint of the same architecture; `--tiny` takes its sizes.
        geometry: the published ones.
        tokens_a_step: what a pass is turned into tokens with, commits included.
        native: vLLM's own class.
        quantization: vLLM's, of the weights when they are loaded.
        most: most requests that it is asked to serve; None for any number.
        extra: what a request carries so that nothing converges.
    """

    tiny: str
    geometry: Geometry
    tokens_a_step: float
    native: bool = False
    quantization: str | None = None
    most: int | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 1 if self.quantization == "fp8" else 2

    @property
    def weights(self) -> float:
        """Bytes of all weights but an embedding of its own, which no step reads as a whole."""
        return floor(self.geometry, 10**6, 0, self.width).weight_bytes


# DiffusionGemma: 16 steps and a commit for each canvas. LLaDA2: LLaDA2.0-flash's mean in the
# LLaDA2.1 report (arXiv 2602.08676).
GEMMA = ("tiny-diffusiongemma", DIFFUSION_GEMMA, 256 / 17)
SYSTEMS = {
    "LLaDA2.0-mini": System("tiny-llada2", LLADA2_MINI, 3.08, extra={"diffusion_threshold": 2.0}),
    "DiffusionGemma": System(*GEMMA),
    # Whole rows of logits let it serve eight, which is therefore its default.
    "DiffusionGemma native": System(*GEMMA, native=True, most=8),
    "DiffusionGemma FP8": System(*GEMMA, quantization="fp8"),
    "DiffusionGemma native FP8": System(*GEMMA, native=True, quantization="fp8", most=8),
}
# What requests ask for; by default nothing converges and tokens are the likeliest.
VARIANTS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0},
    "top_k and top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 1},
}


def write_checkpoint(system: System, path: Path, tiny: bool, layers: int | None) -> None:
    """A checkpoint directory without weights, for ``--load-format dummy``.

    Tokenizer and processor are those of the tiny checkpoint: prompts are token ids here.
    """
    path.mkdir()
    for file in (TINY / system.tiny).iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    place = path / "config.json"
    config = json.loads(place.read_text())
    if not tiny:
        config |= _llada2(layers) if system.tiny == "tiny-llada2" else _gemma(config, layers)
    config.get("text_config", config)["max_position_embeddings"] = POSITIONS
    place.write_text(json.dumps(config))


def _llada2(layers: int | None) -> dict[str, Any]:
    size, (kind,) = LLADA2_MINI, LLADA2_MINI.attention
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": max(size.dense),
        "num_hidden_layers": layers or kind.layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.kv_heads,
        "head_dim": kind.dim,
        "num_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "moe_intermediate_size": size.width,
        "n_group": 8,
        "topk_group": 4,
        "mask_token_id": MASK,
        "block_length": size.canvas,
    }


def _gemma(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    size, (sliding, full) = DIFFUSION_GEMMA, DIFFUSION_GEMMA.attention
    count = layers or sliding.layers + full.layers
    kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(count)]
    kinds[-1] = "full_attention"
    ((dense, _),) = size.dense.items()
    text = config["text_config"] | {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": dense,
        "num_hidden_layers": count,
        "layer_types": kinds,
        "num_attention_heads": sliding.heads,
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.dim,
        "per_layer_config": {
            str(n): {"head_dim": full.dim, "num_key_value_heads": full.kv_heads}
            for n, kind in enumerate(kinds)
            if kind == "full_attention"
        },
        "sliding_window": sliding.window,
        "num_experts": size.experts,
        "top_k_experts": size.chosen,
        "moe_intermediate_size": size.width,
    }
    return {"text_config": text, "canvas_length": size.canvas}


class ExpertTables:
    """Lets every token choose experts at random, from constant tables: no kernel is added.

    With made-up weights all masks of a canvas have nearly the same hidden state, and so the same
    experts: a step would read fewer weights than a trained model's.
    """

    TABLES = 32

    def __init__(self) -> None:
        self.calls, self.tables = 0, dict[Any, Any]()

    def route_tokens(
        self, hidden_states: Any, router_logits: Any, top_k: int, indices_type: Any = None
    ) -> tuple[Any, Any]:
        """As vLLM's `RoutingStrategy.route_tokens`; each call in turn gets another table."""
        import torch

        (count, experts), device = router_logits.shape, hidden_states.device
        key = experts, top_k, indices_type, device
        if key not in self.tables or self.tables[key][0].shape[1] < count:
            rows = max(count, 8192)
            chosen = [
                torch.rand(rows, experts, device=device).topk(top_k).indices
                for _ in range(self.TABLES)
            ]
            weights = torch.full((rows, top_k), 1 / top_k, device=device)
            self.tables[key] = torch.stack(chosen).to(indices_type or torch.int32), weights
        chosen, weights = self.tables[key]
        self.calls += 1
        return weights[:count], chosen[self.calls % self.TABLES][:count]


def spread_experts() -> ExpertTables:
    """Register `ExpertTables` with vLLM's routing simulator; call this before a model is loaded."""
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "tables"
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingSimulator,
        RoutingStrategy,
    )

    strategy = type("Tables", (ExpertTables, RoutingStrategy), {})()
    RoutingSimulator.register_strategy("tables", strategy)
    return strategy


def start(system: System, model: Path, args: argparse.Namespace) -> Any:
    """The engine, with room for all requests of the measurement and no more memory."""
    import torch
    from vllm import LLM

    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28}
    if torch.cuda.is_available():
        # Others may be on the device: as much as the largest batch needs, not what is left.
        requests, tokens = max(counts(system, args.requests)), args.context + args.room
        pages = floor(system.geometry, requests, tokens).cache_bytes
        total = torch.cuda.mem_get_info()[1]
        options["kv_cache_memory_bytes"] = int(1.5 * pages) + (1 << 30)
        options["gpu_memory_utilization"] = min(0.9, (system.weights + BESIDE_WEIGHTS) / total)
    elif args.routing == "uniform":
        options["enforce_eager"] = True  # on a CPU vLLM's simulator of routing does not compile
    if not system.native:  # a step is one pass, as vLLM's own class takes
        options["additional_config"] = {"dllm": {"passes_per_step": 1}}
    if system.tiny == "tiny-diffusiongemma":
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    for given in args.option:
        name, value = given.split("=", 1)
        options[name] = json.loads(value)
    return LLM(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        quantization=system.quantization,
        max_model_len=args.context + args.room,
        max_num_seqs=max(counts(system, args.requests)),
        enable_prefix_caching=False,
        **options,
    )


def chosen(llm: Any) -> dict[str, Any]:
    """What the engine serves with."""
    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    attention = set()
    for layer in compilation.static_forward_context.values():
        if hasattr(layer, "attn_backend"):
            version = getattr(layer.impl, "vllm_flash_attn_version", None)
            attention.add(f"{layer.attn_backend.get_name()} {version or ''}".strip())
    return {
        "attention": ", ".join(sorted(attention)),
        "graphs": compilation.cudagraph_mode.name if compilation.cudagraph_mode else None,
        "graph_sizes": compilation.cudagraph_capture_sizes,
        "async_scheduling": config.scheduler_config.async_scheduling,
    }


def counts(system: System, requests: Sequence[int]) -> list[int]:
    """The numbers of requests that a system is asked to serve."""
    return [n for n in requests if system.most is None or n <= system.most]


class Denoising:
    """Requests that denoise in an engine, after a canvas and its commit of each.

    Raises:
        RuntimeError: they do not fit, or do not commit within the steps that two canvases take.
    """

    def __init__(
        self, llm: Any, system: System, requests: int, args: argparse.Namespace, **asked: Any
    ) -> None:
        from vllm import SamplingParams

        self.engine = llm.llm_engine
        self.requests = requests
        extra = dict(system.extra) or None
        # VLLM's own class takes no other temperature, and is compared with what does as much.
        temperature = 1.0 if system.tiny == "tiny-diffusiongemma" else 0.0
        params = {"temperature": temperature, "max_tokens": args.room, "ignore_eos": True} | asked
        self.names = [f"{requests}-{n}-{time.monotonic_ns()}" for n in range(requests)]
        for n, name in enumerate(self.names):
            ids = [3 + (7 * n + i) % 200 for i in range(args.context)]
            sampling = SamplingParams(extra_args=extra, **params)
            self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        begun = set[str]()
        for _ in range(200 + 10 * requests):
            begun |= {one.request_id for one in self.engine.step() if one.outputs[0].token_ids}
            if len(begun) == requests:
                return
        raise RuntimeError(f"only {len(begun)} of {requests} requests have written a canvas")

    def step(self) -> None:
        """A step of vLLM's; with one in flight, it waits for an earlier one's result."""
        self.engine.step()

    def end(self) -> None:
        """Abort the requests.

        Raises:
            RuntimeError: a request had ended before.
        """
        here = len(self.engine.engine_core.engine_core.scheduler.running)
        self.engine.abort_request(self.names)
        for _ in range(100):
            if not self.engine.has_unfinished_requests():
                break
            self.engine.step()
        if here != self.requests:
            raise RuntimeError(f"{here} of {self.requests} requests were still there")


def measure(batch: Denoising, steps: int) -> dict[str, float]:
    """Milliseconds of steps in which every request denoises or commits."""
    took = []
    for _ in range(steps):
        begin = time.perf_counter()
        batch.step()
        took.append(1e3 * (time.perf_counter() - begin))
    ranked = sorted(took)
    return {
        "ms": round(statistics.median(took), 3),
        "mean_ms": round(statistics.fmean(took), 3),
        "p10_ms": round(ranked[steps // 10], 3),
        "p90_ms": round(ranked[steps * 9 // 10], 3),
    }


def longest(events: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Name the kernels that took longest in all, with their number and milliseconds in a step."""
    took: dict[str, list[float]] = {}
    for name, begin, end in events:
        took.setdefault(name, []).append((end - begin) / 1e3)
    ranked = sorted(took.items(), key=lambda item: -sum(item[1]))[:25]
    steps = PROFILED_STEPS
    return [(name, len(each) / steps, sum(each) / steps) for name, each in ranked]


def longest_gap(events: Sequence[tuple[str, float, float]]) -> float:
    """Return the longest time in milliseconds that no kernel ran, under the profiler."""
    in_order = sorted(events, key=lambda event: event[1:])
    gap, until = 0.0, in_order[0][1] if in_order else 0.0
    for _, begin, end in in_order:
        gap, until = max(gap, begin - until), max(until, end)
    return gap / 1e3


def run_child(args: argparse.Namespace) -> None:
    """Measure one system in this process; each figure is written to `args.json` at once."""
    engines_in_this_process()  # before torch and vLLM are imported
    begin, system = time.monotonic(), SYSTEMS[args.child]
    found: dict[str, Any] = {"seconds": {}, "requests": {}}

    def note(**more: Any) -> None:
        found.update(more)
        found["seconds"]["all"] = round(time.monotonic() - begin, 1)
        args.json.with_suffix(".new").write_text(json.dumps(found))
        args.json.with_suffix(".new").rename(args.json)

    with args.lock.open("w") as lock, tempfile.TemporaryDirectory() as scratch:
        fcntl.flock(lock, fcntl.LOCK_SH)  # while this one starts, none is timed
        tables = spread_experts() if args.routing == "uniform" else None
        import torch

        from vllm_dllm.selftest.steps import busy_ms, device_events

        model = Path(scratch) / "model"
        write_checkpoint(system, model, args.tiny, args.layers)
        llm = start(system, model, args)
        cuda = torch.cuda.is_available()
        found["seconds"]["start"] = round(time.monotonic() - begin, 1)
        note(
            card=torch.cuda.get_device_name() if cuda else None,
            engine=chosen(llm),
            # vLLM's CPU build routes by itself.
            routing="uniform" if tables and tables.calls else "weights",
            memory_gb=round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        )
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in counts(system, args.requests):
            for name, asked in ({"": {}} | (VARIANTS if args.variants else {})).items():
                figures = found["requests"].setdefault(
                    f"{number}, {name}" if name else str(number), {}
                )
                try:
                    batch = Denoising(llm, system, number, args, **asked)
                    figures |= measure(batch, args.steps)
                    note()
                    events = device_events(batch.step, PROFILED_STEPS)
                    if events is not None:
                        busy = busy_ms(events) / PROFILED_STEPS
                        figures["idle_ms"] = round(figures["ms"] - busy, 3)
                        figures["profile"] = {
                            "kernels": len(events) / PROFILED_STEPS,
                            "busy_ms": busy,
                            "longest": longest(events),
                            "longest_gap_ms": longest_gap(events),
                        }
                    batch.end()
                except Exception as error:
                    figures["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                note()
    os._exit(0)  # an engine takes seconds to take down


class Child:
    """The process of a system."""

    def __init__(self, name: str, folder: Path, words: Sequence[str], limit: float) -> None:
        number = list(SYSTEMS).index(name)
        self.system, self.limit = SYSTEMS[name], limit
        self.path, self.log = folder / f"{number}.json", folder / f"{number}.log"
        command = [sys.executable, __file__, "--child", name, "--json", str(self.path)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--lock", str(folder / "lock"), *words],
                env=environment(self.system.native),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.end = time.monotonic() + limit

    def is_over(self) -> bool:
        """Whether it has ended; it is ended when its time is over."""
        if self.process.poll() is None and time.monotonic() > self.end:
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def found(self) -> dict[str, Any]:
        """What it has written; with the end of its log if it was ended or has failed."""
        found = json.loads(self.path.read_text()) if self.path.exists() else {"requests": {}}
        if self.process.poll():
            over = self.process.returncode == -signal.SIGKILL
            found["failed"] = f"ended after {self.limit:.0f} s" if over else "an error"
            found["log"] = self.log.read_text(errors="replace").splitlines()[-30:]
        return found


def run_all(args: argparse.Namespace, words: Sequence[str], report: Any) -> None:
    """Run the systems, as many at a time as the device's memory holds.

    Args:
        args: the command line.
        words: the options of the children.
        report: called each second with what each system has found so far.
    """
    memory = device_memory()
    waiting, running = list(args.systems), dict[str, Child]()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                for name in list(waiting):
                    needs = [SYSTEMS[n].weights + BESIDE_WEIGHTS for n in (name, *running)]
                    if not running or (memory and sum(needs) < memory):
                        waiting.remove(name)
                        running[name] = Child(name, Path(scratch), words, args.limit)
                time.sleep(1)
                for name, one in list(running.items()):
                    if one.is_over():
                        del running[name]
                    found[name] = one.found()
                report(found)
        finally:
            for one in running.values():
                one.kill()


def device_memory() -> float:
    """Bytes of the GPU; 0 without one, where only one system runs at a time."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return float(done.stdout.splitlines()[0]) * (1 << 20)


def figures(found: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The results, with the floor and the speed beside each step of published sizes."""
    systems = json.loads(json.dumps(found))
    for name, one in systems.items():
        system = SYSTEMS[name]
        card = next((card for part, card in CARDS.items() if part in (one.get("card") or "")), None)
        for key, measured in one["requests"].items():
            if "ms" not in measured:
                continue
            number = int(key.split(",")[0])
            measured["floor_ms"] = measured["tokens_per_s"] = None
            if card is not None and not (args.tiny or args.layers):
                least = floor(system.geometry, number, args.context, system.width)
                measured["floor_ms"] = least.milliseconds(card)
                tokens = number * system.tokens_a_step
                measured["tokens_per_s"] = 1e3 / measured["mean_ms"] * tokens
    return {"tokens_a_step": {n: SYSTEMS[n].tokens_a_step for n in systems}, "systems": systems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=1024, help="tokens before each canvas")
    parser.add_argument("--room", type=int, default=2048, help="tokens that may follow")
    parser.add_argument("--steps", type=int, default=100, help="steps to time")
    parser.add_argument(
        "--routing",
        choices=("uniform", "weights"),
        default="uniform",
        help="experts drawn evenly, or by the made-up weights, with which a step reads fewer",
    )
    parser.add_argument(
        "--variants", action="store_true", help="also with row options and logprobs"
    )
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=JSON of vLLM's LLM(...)"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a system")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tiny checkpoints")
    parser.add_argument("--layers", type=int, help="published sizes with fewer layers")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.child:
        run_child(args)
    words = ["--tiny"] * args.tiny + (["--layers", str(args.layers)] if args.layers else [])
    words += ["--variants"] * args.variants
    words += [word for option in args.option for word in ("--option", option)]
    for name in ("context", "room", "steps", "routing"):
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--requests", *map(str, args.requests)]
    results: dict[str, Any] = {}

    def report(found: Mapping[str, Any]) -> None:
        nonlocal results
        new = figures(found, args)
        if new != results:
            results = new
            write(args.json, "real_size", results)

    run_all(args, words, report)
    print("\n".join(markdown(real_size(results))))
    failed = {name: one for name, one in results["systems"].items() if "failed" in one}
    for name, one in failed.items():
        print(f"{name}: {one['failed']}", *one["log"], sep="\n", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
