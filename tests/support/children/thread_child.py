"""Graphs that a step makes after the number of threads has changed, printed as JSON.

    python -m tests.support.children.thread_child MODEL BLOCK

vLLM's GPU worker loads a model with many threads and then leaves one to serve with; its CPU worker
does not, so that is done here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(model: Path, block: int) -> None:
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from tests.support.engine import engine, greedy, our_graphs

    # vLLM's CPU worker replaces the function by one that does nothing.
    load, set_num_threads = GPUModelRunner.load_model, torch.set_num_threads

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        set_num_threads(2)
        load(self, *args, **kwargs)
        set_num_threads(1)

    GPUModelRunner.load_model = load_model  # type: ignore[method-assign]
    with engine(model, block, enforce_eager=False, max_num_seqs=2) as running:
        ahead = our_graphs()
        answers = running.generate([[7, 8, 9]], [greedy(block, ignore_eos=True)])
        found = {"ahead": ahead, "after": our_graphs(), "tokens": len(answers[0][0])}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    # vLLM's settings are read before its first import.
    import tests.support.engine  # noqa: F401

    main(Path(sys.argv[1]), int(sys.argv[2]))
