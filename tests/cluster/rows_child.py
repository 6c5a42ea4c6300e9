"""Rows through two engines of Ray Data, of which one is killed: is a row lost, doubled or changed?

    .venv-ray/bin/python tests/cluster/rows_child.py --log FILE

Problems of all tasks go from Parquet to Parquet by `examples/cluster/ray_data.py`, on a Ray cluster
of two nodes on this machine. When a few rows are written, the actor of an engine gets SIGKILL. Then
one plain engine answers the same prompts, and both are compared, row by row. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Before vLLM is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "RAY_AUTH_MODE" not in os.environ:  # Ray runs what anybody sends to its ports
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})

import pyarrow.parquet as pq  # noqa: E402
from pyarrow import ArrowInvalid, Table  # noqa: E402

from examples.tiny.tasks import TASKS  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402

EXAMPLE = ROOT / "examples" / "cluster" / "ray_data.py"
ENGINE = "vLLMEngineStage"  # of the class's name of the actors that hold an engine
MAX_TOKENS = 64
KILL_AT = 500  # rows that are written
# A line of the log for each batch, with the process of the engine that has answered it.
BATCH = re.compile(r"pid=(\d+)\).* Elapsed time for batch")


def problems(count: int) -> list[dict[str, Any]]:
    """Rows with a number and a prompt, of one task after the other."""
    rng, tasks = random.Random(0), list(TASKS.values())
    return [{"id": n, "prompt": tasks[n % len(tasks)](rng)[0]} for n in range(count)]


def written(target: Path) -> int:
    """How many rows are in the files that are complete."""
    rows = 0
    for path in target.glob("*.parquet"):
        with contextlib.suppress(ArrowInvalid):  # Ray is writing it
            rows += pq.read_metadata(path).num_rows
    return rows


def through_ray(source: Path, target: Path, log: Path) -> dict[str, Any]:
    """Run the example on two nodes, and kill an engine once so many rows are written."""
    nodes = [sys.executable, "-m", "tests.cluster.two_nodes"]
    with subprocess.Popen(
        nodes, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdin and cluster.stdout
        found = json.loads(cluster.stdout.readline())
        command = [sys.executable, str(EXAMPLE), str(source), str(target)]
        command += ["--max-tokens", str(MAX_TOKENS)]
        environment = os.environ | {"RAY_ADDRESS": found["address"], "RAY_DEDUP_LOGS": "0"}
        with log.open("w") as sink:
            example = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
            while written(target) < KILL_AT and example.poll() is None:
                time.sleep(0.1)
            at = written(target)
            cluster.stdin.write(ENGINE + "\n")
            cluster.stdin.flush()
            killed = json.loads(cluster.stdout.readline())
            status = example.wait()
        cluster.stdin.close()
    if status:
        raise RuntimeError(f"the example ended with {status}:\n{log.read_text()[-3000:]}")
    batches = Counter(BATCH.findall(log.read_text()))
    del killed["killed"]  # a process of the past
    return killed | {"rows_before": at, "batches": [*batches.values()]}


def plain(prompts: list[str]) -> list[str]:
    """The answers of one engine without Ray, all asked at once."""
    from vllm import LLM, SamplingParams

    small = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
    llm = LLM(str(TINY_LLADA2), enforce_eager=True, **small)
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    done = llm.chat(messages, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()  # or the end of this process waits for it
    return [one.outputs[0].text for one in done]


def compare(rows: list[dict[str, Any]], out: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of the rows."""
    times = Counter(row["id"] for row in out)
    answers = {row["id"]: row["answer"] for row in out}
    alone = plain([row["prompt"] for row in rows])
    return {
        "rows_in": len(rows),
        "rows_out": len(out),
        "lost": sum(row["id"] not in times for row in rows),
        "doubled": sum(count > 1 for count in times.values()),
        "as_plain": sum(
            answers.get(row["id"]) == text for row, text in zip(rows, alone, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--log", type=Path, required=True, help="of the example")
    args = parser.parse_args()
    rows = problems(10_000)
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-ray-") as folder:
        source, target = Path(folder) / "problems.parquet", Path(folder) / "answers"
        pq.write_table(Table.from_pylist(rows), source)
        results = through_ray(source, target, args.log)
        out = pq.ParquetDataset(target).read().to_pylist()
    results |= compare(rows, out)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
