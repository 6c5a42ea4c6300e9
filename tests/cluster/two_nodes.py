"""A Ray cluster of two nodes on this machine, for as long as its input stays open.

    .venv-ray/bin/python -m tests.cluster.two_nodes

Prints its address. Each line that it reads is a part of a class's name: it kills the first actor of
these with SIGKILL, as a machine that is short of memory does, and prints that actor's process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import ray
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

STORE = 200 << 20  # bytes of Ray's object store on each node
SECONDS = 180  # an engine starts in half a minute, and later on a busy machine


def living(name: str) -> list[tuple[int, str]]:
    """(process, node) of the actors that live, by a part of their class's name."""
    found = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return sorted((one.pid, one.node_id) for one in found if name in one.class_name)


def kill_one(name: str) -> dict[str, object]:
    """Kill an actor, and wait until as many live as before, or none: then it was not replaced."""
    before = living(name)
    (pid, _), begun = before[0], time.monotonic()
    os.kill(pid, signal.SIGKILL)
    now, replaced = before, False
    while now and not replaced and time.monotonic() - begun < SECONDS:
        time.sleep(0.2)
        now = living(name)
        replaced = len(now) == len(before) and now != before
    return {
        "killed": pid,
        "nodes": len({node for _, node in before}),
        "replaced_s": time.monotonic() - begun if replaced else None,
    }


def main() -> None:
    node = {"num_cpus": 2, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": True})
    cluster.add_node(**node)
    ray.init(cluster.address, log_to_driver=False)
    print(json.dumps({"address": cluster.address, "nodes": len(ray.nodes())}), flush=True)
    for line in sys.stdin:
        print(json.dumps(kill_one(line.strip())), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
