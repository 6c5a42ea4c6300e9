"""A reader over the network stops when its queue is shut down; vLLM's own would wait on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_dllm.vllm_patches.nodes import _compare
from vllm_dllm.vllm_patches.other_nodes import interruptible


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """vLLM's writer, and its reader on another node, which is this one."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 0)
    reader = MessageQueue.create_from_handle(writer.export_handle(), -1)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    yield writer, reader


def test_messages_and_timeouts_are_as_before(queues: tuple[Any, Any]) -> None:
    writer, reader = queues
    interruptible(reader)
    threading.Timer(0.5, writer.enqueue, ("one",)).start()
    assert reader.dequeue(indefinite=True) == "one"
    writer.enqueue("two")
    assert reader.dequeue(timeout=5) == "two"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert 0.5 <= time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("known", "message"), [(None, "cancelled"), ("rank 1 died", "rank 1 died")]
)
def test_a_shutdown_stops_a_reader(
    known: str | None, message: str, queues: tuple[Any, Any]
) -> None:
    _, reader = queues
    interruptible(reader, lambda: known)
    threading.Timer(0.3, reader.shutdown).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        reader.dequeue(timeout=30)
    assert time.monotonic() - began < 2


def test_what_differs_is_named() -> None:
    first = {"--dtype": "float32", "--max-num-seqs": 16}
    _compare(first, [first, dict(first)])
    with pytest.raises(ValueError, match="rank 1 is on a node with another --max-num-seqs than"):
        _compare(first, [first, first | {"--max-num-seqs": 8}])
