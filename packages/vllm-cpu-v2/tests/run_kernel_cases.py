"""Worker of test_kernels: run every kernel in Triton's interpreter and its stand-in, and compare.

Started as a script in the environment that `triton_interpreter.interpreter_env` makes, so that
vLLM has real kernels. Each case of kernel_cases.py is run three times with equal seeds:

- with the kernel, in the interpreter;
- with the stand-in, which has to give the same bytes (or, for float results, be close);
- with a kernel that does nothing, which has to give something else. This proves that outputs
  start out poisoned, so that a stand-in which leaves one unwritten is caught.

The result is one line of JSON on stdout.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from kernel_cases import CASES, Outputs
from vllm_cpu_v2 import plugin
from vllm_cpu_v2.launch import KernelStandIn

SEEDS = range(12)
FLOAT_SEEDS = range(2)  # interpreting a loop over the vocabulary is slow


class NoKernel:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return a launcher."""
        return lambda *args, **kwargs: None


@contextmanager
def replaced(module_name: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(kernel)` in a kernel's place in its own module."""
    module = importlib.import_module(f"vllm.v1.worker.gpu.{module_name}")
    kernel = getattr(module, name)
    setattr(module, name, make(kernel))
    try:
        yield
    finally:
        setattr(module, name, kernel)


def worst_difference(left: Outputs, right: Outputs) -> tuple[bool, float]:
    """Whether all bytes are equal, and the largest finite difference of float outputs."""
    equal, worst = left.keys() == right.keys(), 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return False, float("inf")
        same = bool((a == b).all())  # NaN is never right: no case has a row without a finite logit
        equal &= same
        if not same:
            gap = torch.where(a == b, 0, (a.double() - b.double()).abs())  # -inf equals -inf
            worst = max(worst, float(gap.nan_to_num(nan=float("inf")).max()))
    return equal, worst


def examine(name: str) -> dict[str, Any]:
    """Compare one kernel with its stand-in over all seeds."""
    module, function, case = CASES[name]
    kinds: list[str] = []

    def run(seed: int, make: Callable[[Any], Any]) -> Outputs:
        with replaced(module, f"_{function.__name__}_kernel", make):
            return {k: v.clone() for k, v in case(np.random.default_rng(seed)).items()}

    def original(kernel: Any) -> Any:
        kinds.append(type(kernel).__name__)
        return kernel

    equal, worst, noticed = True, 0.0, True
    for seed in FLOAT_SEEDS if module == "sample.logprob" else SEEDS:
        expected = run(seed, original)
        same, gap = worst_difference(expected, run(seed, lambda k: KernelStandIn(k, function)))
        equal, worst = equal and same, max(worst, gap)
        noticed &= not worst_difference(expected, run(seed, lambda k: NoKernel()))[0]
    return {
        "kinds": sorted(set(kinds)),
        "equal": equal,
        "worst": worst,
        "no_kernel_noticed": noticed,
    }


def main() -> None:
    """Print the result of every case."""
    # Fills what torch.empty returns with NaN or the largest integer: the poison of outputs that
    # vLLM's wrappers allocate themselves.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    report: dict[str, Any] = {name: examine(name) for name in sys.argv[1:] or CASES}
    fresh = torch.empty(8), torch.ones(1).new_empty(8), torch.empty_like(torch.ones(8))
    plugin.register()
    report["bridge"] = plugin.parts()
    report["poison"] = all(bool(t.isnan().all()) for t in fresh)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
