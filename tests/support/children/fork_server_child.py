"""What each process of a real engine runs with: forked from a server, or a fresh interpreter."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import TINY


class Watched:
    def settings(self) -> dict[str, Any]:
        """What libraries read when they are loaded, and what is inherited."""
        torch.ones(1 << 22).sum()  # so that OpenMP starts its threads
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        return {
            "threads": torch.get_num_threads(),
            "cores": sorted(os.sched_getaffinity(0)),
            "cores of threads": sorted({str(sorted(os.sched_getaffinity(task))) for task in tasks}),
            "openmp": {k: v for k, v in os.environ.items() if "OMP_" in k},
            "preloaded": os.environ.get("LD_PRELOAD"),
            "SIGTERM": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
            "forked": "vllm_cpu_v2.imported_before_forking" in sys.modules,
        }


def told(way: str) -> Iterator[Any]:
    """The worker's settings, an answer, and whether a script's own fork server is free."""
    from vllm import LLM, SamplingParams
    from vllm_cpu_v2 import fork_server

    if way == "fresh":
        fork_server.can_be_forked = lambda vllm_config: False
    llm = LLM(
        str(TINY / "tiny-llada2"),
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=True,
        worker_extension_cls=f"{Watched.__module__}.{Watched.__qualname__}",
    )
    settings = llm.collective_rpc("settings")[0]
    params = SamplingParams(temperature=0, max_tokens=40)
    answer = llm.chat([[{"role": "user", "content": "64 + 28"}]], params, use_tqdm=False)
    free = forkserver._forkserver._forkserver_address is None  # type: ignore[attr-defined]
    yield settings, answer[0].outputs[0].text, free
