"""A denoise step at the published sizes, with made-up weights: against the floor and vLLM's class.

    python benchmarks/real_size.py --json benchmarks/results/real_size.json

This needs a GPU that holds 52 GB of weights; no checkpoint is downloaded. The engine runs in this
process, compiled and with CUDA graphs as vLLM has them by default. Every request denoises after
`--context` tokens. Nothing converges, so that LLaDA2 decides one token a step and DiffusionGemma
takes all its steps. To try the script on a CPU:

    .venv/bin/python benchmarks/real_size.py --tiny --requests 1 2 --context 40 --steps 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, write  # noqa: E402
from benchmarks.published import DIFFUSION_GEMMA, LLADA2_MINI, Geometry  # noqa: E402
from benchmarks.tables import markdown, real_size  # noqa: E402
from tests.support.checkpoints import TINY  # noqa: E402

# One H200 SXM by its data sheet: bytes a second, dense bfloat16 operations a second.
BANDWIDTH, RATE = 4.8e12, 989e12


@dataclass(frozen=True)
class Floor:
    """The bytes and operations of one step; a multiply-add is two operations."""

    weight_bytes: float
    cache_bytes: float
    operations: float

    @property
    def milliseconds(self) -> float:
        """The least time of the step on one H200."""
        return 1e3 * max((self.weight_bytes + self.cache_bytes) / BANDWIDTH, self.operations / RATE)


def floor(model: Geometry, requests: int, context: int, width: int = 2) -> Floor:
    """The floor of a step in which `requests` requests denoise, each after `context` tokens.

    Args:
        model: its geometry.
        requests: canvases in the batch.
        context: tokens before each canvas.
        width: bytes of a weight (2 for bfloat16, 1 for float8); keys and values have 2.
    """
    tokens, hidden = requests * model.canvas, model.hidden
    expert = 3 * hidden * model.width
    touched = model.experts * (1 - (1 - model.chosen / model.experts) ** tokens)
    always = sum(a.layers * a.weights(hidden) for a in model.attention)
    always += sum(3 * hidden * size * layers for size, layers in model.dense.items())
    always += model.moe_layers * hidden * model.experts  # routers
    heads = (2 if model.tied else 1) * hidden * model.vocabulary
    weights = always + heads + model.moe_layers * touched * expert
    per_token = always + heads + model.moe_layers * model.chosen * expert
    cache = attended = 0.0
    for a in model.attention:
        keys = min(context, a.window or context) + model.canvas
        cache += 2.0 * requests * a.layers * keys * a.kv_heads * a.dim * a.values
        attended += 4.0 * tokens * a.layers * keys * a.heads * a.dim
    return Floor(width * weights, cache, 2.0 * tokens * per_token + attended)


MASK = 156895  # of LLaDA2.0's vocabulary
POSITIONS = 32768
WARM = 10  # steps before the clock starts


@dataclass(frozen=True)
class System:
    """A system that is timed.

    Attributes:
        tiny: checkpoint of the same architecture; `--tiny` takes its sizes.
        geometry: the published ones.
        native: vLLM's own class.
        quantization: vLLM's, of the weights when they are loaded.
        most: most requests that it is asked to serve; None for any number.
        extra: what a request carries so that nothing converges.
    """

    tiny: str
    geometry: Geometry
    native: bool = False
    quantization: str | None = None
    most: int | None = None
    extra: Mapping[str, float] | None = None

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 1 if self.quantization == "fp8" else 2


GEMMA = ("tiny-diffusiongemma", DIFFUSION_GEMMA)
SYSTEMS = {
    "LLaDA2.0-mini": System("tiny-llada2", LLADA2_MINI, extra={"diffusion_threshold": 2.0}),
    "DiffusionGemma": System(*GEMMA),
    "DiffusionGemma FP8": System(*GEMMA, quantization="fp8"),
    # Whole rows of logits let it serve eight, which is therefore its default.
    "DiffusionGemma native": System(*GEMMA, native=True, most=8),
    "DiffusionGemma native FP8": System(*GEMMA, native=True, quantization="fp8", most=8),
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


def start(system: System, model: Path, args: argparse.Namespace) -> Any:
    """The engine, with room for all requests of the measurement."""
    from vllm import LLM

    # On a GPU vLLM finds out what is left; on a CPU it would take half of the memory.
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28} if args.tiny else {}
    if system.tiny == "tiny-diffusiongemma":
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
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


def counts(system: System, requests: Sequence[int]) -> list[int]:
    """The numbers of requests that a system is asked to serve."""
    return [n for n in requests if system.most is None or n <= system.most]


def measure(llm: Any, system: System, requests: int, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step in which every request denoises.

    Returns:
        `ms` (the mean) and `median_ms`.

    Raises:
        RuntimeError: a request ended before the clock did.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    params = SamplingParams(
        max_tokens=args.room, ignore_eos=True, extra_args=dict(system.extra or {}) or None
    )
    names = [f"{requests}-{n}" for n in range(requests)]
    for n, name in enumerate(names):
        ids = [3 + (7 * n + i) % 200 for i in range(args.context)]
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    while len(scheduler.running) < requests or any(
        one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running
    ):
        engine.step()
    took = []
    for _ in range(WARM + args.steps):
        begin = time.perf_counter()
        engine.step()
        took.append(1e3 * (time.perf_counter() - begin))
    if len(scheduler.running) != requests:
        raise RuntimeError(f"{len(scheduler.running)} of {requests} requests are still there")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    # With a step in flight a call waits for another step's result, so the mean is the step's time.
    return {"ms": statistics.fmean(took[WARM:]), "median_ms": statistics.median(took[WARM:])}


def run_child(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The measurements of one system in this process, by number of requests."""
    engines_in_this_process()  # before torch and vLLM are imported
    system = SYSTEMS[args.child]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_checkpoint(system, model, args.tiny, args.layers)
        llm = start(system, model, args)
        return {str(n): measure(llm, system, n, args) for n in counts(system, args.requests)}


def figures(by_system: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The results with the floor beside each step, where the sizes are the published ones."""
    published = not (args.tiny or args.layers)
    for name, by_requests in by_system.items():
        system = SYSTEMS[name]
        for requests, measured in by_requests.items():
            least = floor(system.geometry, int(requests), args.context, system.width)
            measured["floor_ms"] = least.milliseconds if published else None
    return {"tokens_per_forward": args.tokens_per_forward, "systems": dict(by_system)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens before each canvas")
    parser.add_argument("--room", type=int, default=2048, help="tokens that may follow")
    parser.add_argument("--steps", type=int, default=100, help="steps to time")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tiny checkpoints")
    parser.add_argument("--layers", type=int, help="published sizes with fewer layers")
    parser.add_argument(
        "--tokens-per-forward",
        type=float,
        default=3.08,
        help="what LLaDA2's steps are turned into tokens with; the default is LLaDA2.0-flash's "
        "mean in the LLaDA2.1 report (arXiv 2602.08676)",
    )
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_child(args)))
        return
    shared = ["--tiny"] * args.tiny + (["--layers", str(args.layers)] if args.layers else [])
    for name in ("context", "room", "steps"):
        shared += [f"--{name}", str(getattr(args, name))]
    shared += ["--requests", *map(str, args.requests)]
    by_system = {
        name: child(__file__, "--child", name, *shared, native=SYSTEMS[name].native)
        for name in args.systems
    }
    results = figures(by_system, args)
    print("\n".join(markdown(real_size(results))))
    write(args.json, "real_size", results)


if __name__ == "__main__":
    main()
