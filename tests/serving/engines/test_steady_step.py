"""A steady denoise step neither waits for the device nor loops over requests.

Seen on the real engine: what this package's code calls in one step in which every request denoises.
The CPU's stand-ins for Triton kernels (vllm-cpu-v2) are left out; a GPU does not run them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_dllm
from tests.support.drive import TWO_BLOCKS, Driver, Family, gemma, llada2
from vllm_dllm.engine.contracts import StepPlan
from vllm_dllm.engine.slots import Phase

pytestmark = pytest.mark.engine

PACKAGE = str(Path(vllm_dllm.__file__).parent)
# Reads a tensor that vLLM keeps on the host.
ON_HOST = {"AttentionBatch.max_seq_len"}
# Methods of a tensor that need its values, or its copy, on the host.
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
# Operators whose result's shape depends on values: the device must be waited for.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount")


@pytest.fixture(scope="module", params=["llada2", "two-blocks", "gemma"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if request.param == "llada2":
        return llada2()
    if request.param == "two-blocks":
        return replace(llada2(), engine=TWO_BLOCKS)
    return gemma(tmp_path_factory.mktemp("gemma") / "model")


def ours(frame: Any) -> bool:
    inside = frame.f_code.co_filename.startswith(PACKAGE)
    return inside and frame.f_code.co_qualname not in ON_HOST


class Waits(TorchDispatchMode):
    """Counts operators that wait, when this package's code is the nearest caller outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_", "index_put") and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        )
        if (name in WAITS or masks) and ours(caller()):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def caller() -> Any:
    """The nearest frame that is neither of torch nor of this file."""
    frame = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


@contextmanager
def counted_reads(found: Counter[str]) -> Iterator[None]:
    """Count what our code reads from tensors to the host."""
    stock = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if ours(caller()):
                found[name] += 1
            return stock[name](self, *args, **kwargs)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield
    finally:
        for name, method in stock.items():
            setattr(torch.Tensor, name, method)


def steady(driver: Driver, family: Family, requests: int, *options: dict[str, Any]) -> None:
    """So many requests, all in the middle of a canvas; they take turns with these parameters."""
    prompts = family.prompts([20] * requests, seed=requests)
    for n, prompt in enumerate(prompts):
        own = options[n % len(options)] if options else {}
        driver.add(f"r{requests}x{n}", prompt, family.params(64, **own))
    denoise(driver, [f"r{requests}x{n}" for n in range(requests)])


def denoise(driver: Driver, names: list[str]) -> None:
    """Until all of these are in the middle of a canvas."""

    def denoising() -> bool:
        canvases = [driver.canvas(name) for name in names]
        return all(c is not None and c[0] is Phase.DENOISE and c[2] > 0 for c in canvases)

    driver.until(denoising)


def calls_of_step(driver: Driver) -> Counter[str]:
    """Python calls of one step into this package, by function."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and ours(frame):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        driver.step()
    finally:
        sys.setprofile(None)
    return calls


def test_nothing_is_read_back(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for an `.item()`, a boolean index or a `nonzero` between forward and output.

    Also with logprobs, for some requests of the batch or for all of them. On a CPU a step reads
    which rows are masked; here it takes all, like a GPU.
    """
    monkeypatch.setattr(StepPlan, "masked_rows", lambda *_: None)
    kinds: list[list[dict[str, Any]]] = [[{}], [{}, {"logprobs": 2}], [{"logprobs": 3}]]
    with family.start() as running:
        for kind in kinds:
            driver, found = Driver(running), Counter[str]()
            steady(driver, family, 4, *kind)
            with counted_reads(found), Waits() as waits:
                driver.step()
            assert not found + waits.found, kind
            driver.finish()


def test_no_loop_over_requests(family: Family) -> None:
    """As many calls for twelve requests as for three; vLLM asks the scheduler's hooks for each."""
    split = ("._mamba_block_aligned_split", ".tokens_to_schedule", "._canvas", "._whole_canvas")
    hook = (*split, ".make_spec_decoding_stats")
    with family.start() as running:
        driver = Driver(running)
        seen = []
        for requests in (3, 12):
            steady(driver, family, requests)
            seen.append(calls_of_step(driver))
            driver.finish()
    few, many = ({k: n for k, n in c.items() if not k.endswith(hook)} for c in seen)
    assert few == many
    assert sum(few.values()) > 10  # our code ran
