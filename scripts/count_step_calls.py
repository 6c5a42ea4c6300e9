"""Count the Python calls of a steady denoise step, from the sampler's ``__call__`` to its return.

    .venv/bin/python scripts/count_step_calls.py            # both families
    .venv/bin/python scripts/count_step_calls.py --check    # status 1 above the limits
    .venv/bin/python scripts/count_step_calls.py --list     # with every call, in order

Only this package's files count. A *call* is one that goes to another file than the call before it;
calls that stay in a file are what reading that file shows anyway, and are only listed. A *return*
is a call to a file that the step had entered before and left since. Functions that PyTorch has
compiled do not show, so the engine runs eagerly.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

PACKAGE = str(ROOT / "vllm_dllm")
CHECKPOINTS = ROOT / "examples/tiny/checkpoints"
# Family -> (checkpoint, most calls, most files, an option that lets no canvas finish early).
FAMILIES: dict[str, tuple[str, int, int, dict[str, float]]] = {
    "llada2": ("tiny-llada2", 30, 10, {"diffusion_threshold": 2.0}),
    "diffusion_gemma": ("tiny-diffusiongemma", 52, 16, {"diffusion_confidence_threshold": 1e-9}),
}
REQUESTS = 2


@dataclass(frozen=True)
class Calls:
    """The functions that one step entered, in order, as (file, function)."""

    functions: tuple[tuple[str, str], ...]

    @property
    def visits(self) -> list[str]:
        """The files in the order in which the step calls them; one entry for each call."""
        files = [file for file, _ in self.functions]
        return [file for n, file in enumerate(files) if n == 0 or files[n - 1] != file]

    @property
    def files(self) -> set[str]:
        """The files that the step calls."""
        return set(self.visits)

    @property
    def returns(self) -> int:
        """Calls to a file that the step had left."""
        return len(self.visits) - len(self.files)


class CountingSampler:
    """Stands for the runner's sampler and records the calls of its last step."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.last = Calls(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, hidden_states: Any, input_batch: Any) -> Any:
        """Sample, and record what is called."""
        calls: list[tuple[str, str]] = []

        def profile(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(PACKAGE):
                calls.append((code.co_filename[len(PACKAGE) + 1 :], code.co_qualname))

        sys.setprofile(profile)
        try:
            return self.sampler(hidden_states, input_batch)
        finally:
            sys.setprofile(None)
            self.last = Calls(tuple(calls))


def steady_calls(checkpoint: Path, options: dict[str, float]) -> Calls:
    """The calls of a step in which every request is in the middle of a canvas."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoint),
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        max_model_len=1024,
        max_num_seqs=4,
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.sampler = counting = CountingSampler(runner.sampler)
    params = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, extra_args=options)
    for number in range(REQUESTS):
        ids = [5 + (7 * number + position) % 40 for position in range(24)]
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    slots = runner.model_state.slots
    for _ in range(50):
        _, executed = core.step_fn()
        core.post_step(executed)
        used = list(runner.req_states.req_id_to_index.values())
        if len(used) == REQUESTS and (slots.step[used] > 1).all():
            break
    else:
        raise RuntimeError("no steady step within 50 steps")
    calls = counting.last
    llm.llm_engine.abort_request([str(number) for number in range(REQUESTS)])
    core.step_fn()
    llm.llm_engine.engine_core.shutdown()
    return calls


def main() -> int:
    """Print the counts of the families asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="status 1 above the limits")
    parser.add_argument("--list", action="store_true", help="print every call")
    args = parser.parse_args()
    within = True
    for family in args.families:
        checkpoint, most_calls, most_files, options = FAMILIES[family]
        calls = steady_calls(CHECKPOINTS / checkpoint, options)
        visits, files = len(calls.visits), len(calls.files)
        within &= visits <= most_calls and files <= most_files
        print(
            f"{family}: {visits} calls (at most {most_calls}) in {files} files "
            f"(at most {most_files}), {calls.returns} returns, {len(calls.functions)} frames"
        )
        if args.list:
            print("\n".join(f"    {file}: {function}" for file, function in calls.functions))
    return 1 if args.check and not within else 0


if __name__ == "__main__":
    sys.exit(main())
