"""``--bench``: time denoise steps of the tiny models, and compute the least time they could take.

The least time follows from reading the weights once and from two operations per token for each
weight that the token uses; keys and values are few here and left out. Tiny models take far longer
than that, because launches dominate their steps, and that is what the figure shows.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.selftest.cases import ATTENTION, COMPILED, DEFAULT, EAGER, FAMILIES, Case
from vllm_dllm.selftest.machine import Machine

CONTEXT = 64  # prompt tokens
ROOM = 768  # tokens that may follow
WARM = 8
# With these options nothing converges: masked models decide one token per step, and DiffusionGemma
# takes all its steps.
UNCERTAIN = {name: {"diffusion_threshold": 2.0} for name in ("llada2", "sdar")}
STEPS = 64  # of a canvas of DiffusionGemma


@dataclass(frozen=True)
class System:
    """A timed system: a case, and whether vLLM's own class serves it."""

    case: Case
    native: bool = False

    @property
    def name(self) -> str:
        """The system's name in the table."""
        return f"{self.case.family}{', native' if self.native else ''}, {self.case.graphs}"


def systems(machine: Machine) -> list[System]:
    """The systems timed on a machine: what is served by default, and on a CPU the short form."""
    graphs = EAGER if machine.is_cpu else DEFAULT
    dtype = "float32" if machine.is_cpu else "bfloat16"
    found = [System(Case(family, graphs=graphs, dtype=dtype)) for family in FAMILIES]
    return [*found, System(Case("diffusion_gemma", graphs=graphs, dtype=dtype), native=True)]


def job(system: System, checkpoints: Path, machine: Machine) -> dict[str, Any]:
    """The job that the child for a system gets."""
    short = machine.is_cpu
    environment = {"VLLM_DLLM_NATIVE": "1" if system.native else "0"}
    if system.native and system.case.graphs in (EAGER, COMPILED):
        environment["TORCH_COMPILE_DISABLE"] = "1"  # eager does not switch off its sampler's
    return {
        "bench": True,
        "case": system.case.as_dict(),
        "model": str(checkpoints / FAMILIES[system.case.family]),
        "environment": environment,
        "requests": [1, 4] if short else [1, 4, 8, 16],
        "steps": 20 if short else 100,
        "native": system.native,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one system; this runs in the child.

    Returns:
        `device` (bandwidth, rate), and by number of requests `ms`, `median_ms` and `least_ms`.
    """
    import torch
    from vllm import LLM

    from vllm_dllm import plugin
    from vllm_dllm.selftest.child import engine_options
    from vllm_dllm.selftest.floor import measure

    plugin.install()
    case = job["case"]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(job["model"])
        if case["family"] == "diffusion_gemma":
            model = _never_sure(model, Path(scratch) / "model")
        options = engine_options(case, str(model)) | {"enable_prefix_caching": False}
        if job["native"]:
            options["additional_config"] = {}
        llm = LLM(**options)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    device = measure("cuda" if torch.cuda.is_available() else "cpu", runner.dtype)
    found: dict[str, Any] = {"device": vars(device), "steps": {}}
    for requests in job["requests"]:
        extra = UNCERTAIN.get(case["family"])
        timed = time_steps(llm, _prompts(requests), ROOM, extra, (WARM, job["steps"]))
        tokens = requests * ATTENTION[case["family"]].canvas_length
        moved, operations = _needs(runner.model, tokens)
        least = 1e3 * device.least(moved, operations)
        found["steps"][str(requests)] = timed | {"least_ms": least}
    return found


def _never_sure(model: Path, copy: Path) -> Path:
    """A copy of a DiffusionGemma checkpoint whose canvases take all their steps."""
    shutil.copytree(model, copy)
    path = copy / "generation_config.json"
    content = json.loads(path.read_text("utf-8"))
    content |= {"max_denoising_steps": STEPS, "confidence_threshold": 1e-30}
    path.write_text(json.dumps(content), "utf-8")
    return copy


def _needs(model: Any, tokens: int) -> tuple[float, float]:
    """Bytes that a step reads and operations that it performs.

    The experts are those of the tiny checkpoints: a token uses 2 of 8, and a canvas uses all.
    """
    moved = operations = 0.0
    for name, weight in model.named_parameters():
        if "vision" in name:
            continue
        moved += weight.numel() * weight.element_size()
        share = 0.25 if "expert" in name and "shared" not in name else 1.0
        operations += 2.0 * tokens * share * weight.numel()
    return moved, operations


def _prompts(count: int) -> list[list[int]]:
    return [[20 + (7 * n + i) % 200 for i in range(CONTEXT)] for n in range(count)]


def time_steps(
    llm: Any,
    prompts: Sequence[list[int]],
    room: int,
    extra: Mapping[str, float] | None,
    counts: tuple[int, int],
) -> dict[str, float]:
    """Milliseconds of a step in which every request denoises.

    Args:
        llm: vLLM's `LLM`, with its engine in this process and seats for all requests.
        prompts: token ids, one list for each request.
        room: how many tokens may follow; enough that no request ends.
        extra: extra arguments of the requests that keep them from converging, or None.
        counts: how many steps run before the clock starts, and how many are timed.

    Returns:
        `ms` (the mean) and `median_ms`.

    Raises:
        RuntimeError: a request ended before the clock did.
    """
    from vllm import SamplingParams

    engine, requests, (warm, steps) = llm.llm_engine, len(prompts), counts
    scheduler = engine.engine_core.engine_core.scheduler
    params = SamplingParams(max_tokens=room, ignore_eos=True, extra_args=dict(extra or {}) or None)
    names = [f"{requests}-{n}" for n in range(requests)]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    while len(scheduler.running) < requests or any(
        one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running
    ):
        engine.step()
    took = []
    for _ in range(warm + steps):
        begin = time.perf_counter()
        engine.step()
        took.append(1e3 * (time.perf_counter() - begin))
    if len(scheduler.running) != requests:
        raise RuntimeError(f"{len(scheduler.running)} of {requests} requests are still there")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    # With a step in flight a call waits for another step's result, so the mean is the step's time.
    return {"ms": statistics.fmean(took[warm:]), "median_ms": statistics.median(took[warm:])}
