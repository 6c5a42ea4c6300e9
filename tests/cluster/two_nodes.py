"""A Ray cluster of two nodes on this machine, for as long as its input stays open.

    .venv-ray/bin/python -m tests.cluster.two_nodes

Prints its address.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import ray
from ray.cluster_utils import Cluster

STORE = 200 << 20  # bytes of Ray's object store on each node


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster to which this process is connected."""
    node = {"num_cpus": 2, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": True})
    cluster.add_node(**node)
    ray.init(cluster.address, log_to_driver=False)
    assert len(ray.nodes()) == 2
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    with two_nodes() as address:
        print(address, flush=True)
        sys.stdin.read()
