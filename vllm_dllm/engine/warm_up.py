"""Prepares a worker for its first request.

All ranks that have a readout call these functions together. They write to slots, which are set up
again for every request.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_dllm.decoding import Algorithm
from vllm_dllm.engine.contracts import EXAMPLE_ROWS, Batch, StepPlan
from vllm_dllm.engine.row_options import COSTLY, RowOptions
from vllm_dllm.engine.slots import HOST_FLAGS
from vllm_dllm.ops.compiled import compiling_ahead

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state_view import ModelStateView
    from vllm_dllm.settings.resolution import ResolvedDecoding

# The number of canvases in the example for which updates are compiled.
EXAMPLE_CANVASES = 4

logger = init_logger("vllm.dllm")


def compile_sampler(state: ModelStateView) -> None:
    """Compile what runs after the model.

    Only algorithms that this package provides are compiled: others need not be compilable. Nothing
    is where the server's own verifies.
    """
    begin = time.perf_counter()
    logger.info("dllm: compiling the sampler; the first start of a model takes up to a minute")
    with compiling_ahead():
        state.readout.warm_up(_hidden(state, EXAMPLE_ROWS))
    # A CPU starts operators in microseconds, and would take 40 s more for a start without a cache.
    others = state.served.algorithm_names if state.slots.device.type != "cpu" else ()
    if not state.served.choose().algorithm.verifies:
        compile_updates(state, others)
    if state.slots.device.type != "cpu":  # a CPU does it with the first constraint: see `cpu_paths`
        from canvas_grammar.decoding.path_finder import warm_up

        warm_up(state.slots.device, state.slots.length)
    logger.info("dllm: compiled the sampler in %.1f s", time.perf_counter() - begin)


def compile_updates(state: ModelStateView, others: Collection[str] = ()) -> None:
    """Compile the update of canvases, for batches of any size and of any algorithms.

    The step of the server's own algorithm is compiled, too, and of the `others` if they are ours;
    with others, what keeps logprobs is as well.
    """
    slots, served, sampler = state.slots, state.served, state.sampler
    assert sampler is not None
    update, own = sampler.canvas_update, served.choose()
    names = filter(served.accepts, others)
    choices = [own, *(served.choose({"algorithm": name}) for name in names)]
    count = min(EXAMPLE_CANVASES, len(slots.tokens))
    slot = torch.zeros(count, dtype=torch.int64, device=slots.device)
    on_host: np.ndarray = np.zeros(count, dtype=np.int64)
    update.compiles = update.compiles_ahead = True
    if own.is_ours:
        update.compiled_algorithm = own.algorithm.name
    with torch.inference_mode():
        hidden, widths = _hidden(state, count * slots.length), torch.full_like(slot, slots.length)
        slots.algorithms.enter(0, own.algorithm, own.settings)
        sampler.update(hidden, update.batch(slot, on_host), slots.length)
        batch = replace(update.batch(slot, on_host), entropy=True)
        readings = state.readout.read(hidden, update.plan(batch, widths))
        for choice in filter(_has_compiled_step, choices):
            slots.algorithms.enter(0, choice.algorithm, choice.settings)
            update.compiled_steps.add(choice.algorithm.name)
            plan = update.plan(update.batch(slot, on_host), widths)
            update.denoised(plan, plan.status, readings)
        slots.algorithms.enter(0, own.algorithm, own.settings)
        if others:
            state.parts.logprobs.compile()
            state.parts.rows.enter(0, RowOptions(logprobs=0))
        sampler.update(hidden, update.batch(slot, on_host), widths)
        state.parts.leave(0)
    update.compiles_ahead = False


def _has_compiled_step(choice: ResolvedDecoding) -> bool:
    """Whether the step of an algorithm is compiled: not if it needs more than all batches have."""
    algorithm: Any = choice.algorithm
    more = algorithm.likeliest > 0 or type(algorithm).ask is not Algorithm.ask
    return choice.is_ours and not (algorithm.verifies or more)


def read_largest_batch(state: ModelStateView) -> None:
    """Read the most canvases of a step, all of them drawn, then also with the options of `COSTLY`.

    Whole rows of logits are held for `Readout.canvases` canvases at a time, so no more than that
    many have these options. The slots are left unchanged.
    """
    canvases = min(state.max_num_reqs, state.max_num_tokens // state.served.window_length)
    hidden = _hidden(state, canvases * state.slots.length)
    costly = range(min(canvases, state.readout.canvases))
    samples = state.slots.samples.copy()
    state.slots.samples[:canvases] = True
    with torch.inference_mode():
        try:
            state.readout.read(hidden, _plan(state, canvases, needs_rows=False))
            for slot in costly:
                state.parts.rows.enter(slot, COSTLY)
            state.readout.read(hidden, _plan(state, canvases, needs_rows=True))
        finally:
            for slot in costly:
                state.parts.leave(slot)
            state.parts.logprobs.pending.clear()
            state.slots.samples[:] = samples


def _plan(state: ModelStateView, canvases: int, needs_rows: bool) -> StepPlan:
    device, flags = state.slots.device, dict.fromkeys(HOST_FLAGS, False)
    flags |= {"samples": True, "several_steps": True, "needs_rows": needs_rows}
    batch = Batch(
        torch.arange(canvases, device=device),
        np.arange(canvases),
        flags,
        entropy=True,
        likeliest=state.served.choose().algorithm.likeliest,
    )
    temperature = torch.ones(canvases, device=device)
    return StepPlan(batch, state.slots, state.slots.length, temperature)


def _hidden(state: ModelStateView, rows: int) -> torch.Tensor:
    """Example hidden states, ``[rows, hidden]``."""
    width = state.model_config.get_hidden_size()
    return torch.zeros((rows, width), dtype=state.dtype, device=state.slots.device)
