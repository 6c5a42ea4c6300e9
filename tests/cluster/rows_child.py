"""Problems of all tasks through two engines of Ray Data, of which one is killed.

    .venv-ray/bin/python -m tests.cluster.rows_child FOLDER

`examples/cluster/ray_data.py` reads and writes Parquet in the folder, on a Ray cluster of two
nodes. When a few rows are written, the actor of an engine gets SIGKILL, as on a machine that is
short of memory. Prints what came back as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import ArrowInvalid, Table
from ray.util.state import list_actors

from examples.tiny.tasks import TASKS
from tests.cluster.two_nodes import two_nodes
from tests.support.checkpoints import ROOT

ENGINE = "vLLMEngineStage"  # of the class's name of the actors that hold an engine
KILL_AT = 500  # rows that are written
SECONDS = 180  # an engine starts in half a minute, and later on a busy machine


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


def engines() -> list[tuple[int, str]]:
    """(process, node) of the actors that hold an engine and live."""
    found = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return sorted((one.pid, one.node_id) for one in found if ENGINE in one.class_name)


def kill_one() -> dict[str, Any]:
    """Kill an engine, and wait until as many live as before, or none: then it was not replaced."""
    before, begun = engines(), time.monotonic()
    os.kill(before[0][0], signal.SIGKILL)
    now, replaced = before, False
    while now and not replaced and time.monotonic() - begun < SECONDS:
        time.sleep(0.2)
        now = engines()
        replaced = len(now) == len(before) and now != before
    return {"nodes": len({node for _, node in before}), "replaced": replaced}


def main(folder: Path) -> None:
    source, target = folder / "problems.parquet", folder / "answers"
    pq.write_table(Table.from_pylist(problems(10_000)), source)
    command = [sys.executable, str(ROOT / "examples" / "cluster" / "ray_data.py")]
    command += [str(source), str(target), "--max-tokens", "64"]
    with two_nodes() as address, (folder / "log").open("w") as sink:
        environment = os.environ | {"RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0"}
        example = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
        while written(target) < KILL_AT and example.poll() is None:
            time.sleep(0.1)
        found = {"rows_before": written(target)} | kill_one()
        found["status"] = example.wait()
    print(json.dumps(found | {"rows": pq.ParquetDataset(target).read().to_pylist()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
