"""How much memory does a denoise step of DiffusionGemma take beyond the weights?

    .venv/bin/python benchmarks/head_memory.py --json benchmarks/results/head_memory.json

Serves a one-layer model with the real vocabulary (262,144 ids, canvas 256) with this package's
class, eager and compiled, and with vLLM's own, each in a process of its own, and prints the peak of
the process' memory during one steady denoise step over what it held before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from benchmarks.common import write  # noqa: E402
from tests.support.head_memory import (  # noqa: E402
    COMPILED,
    EAGER,
    MEGABYTE,
    NATIVE,
    in_child,
    make_model,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--native-requests", type=int, default=4, help="for vLLM's own class")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        for name, requests in (
            (EAGER, args.requests),
            (COMPILED, args.requests),
            (NATIVE, args.native_requests),
        ):
            results[name] = usage = in_child(model, name, requests)
            print(
                f"{name:20}{usage['requests']:5.0f} requests{usage['bytes'] / MEGABYTE:10.0f} MB"
                f"{usage['per_request'] / MEGABYTE:10.1f} MB a request{usage['s']:8.1f} s a step"
            )
    write(args.json, "head_memory", results)


if __name__ == "__main__":
    main()
