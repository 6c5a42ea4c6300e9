"""Experts that are spread over ranks of a CPU: plain PyTorch in the place of vLLM's CPU kernel.

That kernel takes no map of experts, so that `startup.checks` refuses to spread them. What is tried
is all that surrounds it. An engine with `Recorder` as `worker_extension_cls` imports this module in
each of its workers, before they build the model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm_cpu_v2.plain_experts import PlainExperts, unrounded

from vllm_dllm.startup import checks

# Rows of each call of a layer's experts, by how many there were of them.
_calls: dict[int, int] = {}
_maps: set[tuple[int, ...]] = set()
_WITHOUT_ROUNDING: Any = SimpleNamespace(roundings=(unrounded, unrounded))


def _apply(self: Any, **given: Any) -> None:
    rows = len(given["hidden_states"])
    _calls[rows] = _calls.get(rows, 0) + 1
    if given["expert_map"] is not None:
        _maps.add(tuple(given["expert_map"].tolist()))
    PlainExperts.apply(_WITHOUT_ROUNDING, **given)


def spread() -> None:
    """Compute experts in plain PyTorch in this process, and refuse no spreading of them."""
    CPUUnquantizedExperts.apply = _apply
    # Else the weights would be packed for the kernel.
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    checks.cannot_be_spread = lambda vllm_config: False


class Recorder:
    model_runner: Any

    def experts(self) -> dict[str, Any]:
        """Experts that this rank's layers hold, the maps that were used, and rows of calls."""
        layers = self.model_runner.model.named_parameters()
        held = {len(weight) for name, weight in layers if name.endswith("w13_weight")}
        return {"held": sorted(held), "maps": sorted(_maps), "rows": sorted(_calls)}


spread()
