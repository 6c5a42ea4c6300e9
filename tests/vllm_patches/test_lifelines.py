"""Who dies is missed, and who was asked to end is not: over real connections of real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_dllm.vllm_patches import lifelines
from vllm_dllm.vllm_patches.lifelines import Lifelines, hold

HOST = "127.0.0.1"
SECONDS = 5.0
CHILD = """
import sys, threading
from vllm_dllm.vllm_patches.lifelines import hold

ended = threading.Event()

def on_end(cause):
    print(repr(cause), flush=True)
    ended.set()

host, port, word, rank = sys.argv[1:]
hold((host, int(port), word), int(rank), 1, on_end)
ended.wait()
"""
ROOT = str(Path(__file__).resolve().parents[2])


@contextmanager
def worker(lines: Lifelines, rank: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a connection, prints how its engine ended, and ends."""
    address = [*map(str, lines.address), str(rank)]
    environment = os.environ | {"PYTHONPATH": ROOT}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *address], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_worker_is_named() -> None:
    lines, heard = Lifelines(HOST), threading.Event()
    with worker(lines, 2), worker(lines, 3) as killed:
        lines.accept([2, 3])
        lines.watch(heard.set)
        assert lines.lost(0.2) is None
        assert not heard.is_set()
        killed.send_signal(signal.SIGKILL)
        assert heard.wait(SECONDS)
        assert f"rank 3 on node 1 ({HOST}, pid {killed.pid}) died" in (lines.lost() or "")


@pytest.mark.parametrize(
    ("cause", "heard"),
    [
        (None, "None"),
        ("ValueError: 3", "'the engine on the first node died: ValueError: 3'"),
        ("x" * 10_000, "'the engine on the first node died: " + "x" * 4095 + "'"),
    ],
)
def test_an_engine_that_ends_says_why(cause: str | None, heard: str) -> None:
    """Once: what follows is the consequence. And a worker that then ends is not lost."""
    lines, lost = Lifelines(HOST), threading.Event()
    with worker(lines, 1) as process:
        lines.accept([1])
        lines.watch(lost.set)
        lines.end(cause)
        lines.end("its executor was shut down")
        assert process.wait(SECONDS) == 0
        assert process.stdout is not None
        assert process.stdout.read().strip() == heard
        assert not lost.wait(0.2)
        assert lines.lost() is None


def test_an_engine_that_is_killed() -> None:
    """Its process says nothing; the kernel closes the connection."""
    engine = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "from vllm_dllm.vllm_patches.lifelines import Lifelines; import time\n"
            f"lines = Lifelines({HOST!r}); print(*lines.address, flush=True)\n"
            "lines.accept([1]); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    with engine:
        assert engine.stdout is not None
        host, port, word = engine.stdout.readline().split()
        heard: list[str | None] = []
        hold((host, int(port), word), 1, 1, heard.append)
        time.sleep(0.2)
        assert not heard
        engine.kill()
        until(lambda: heard)
    assert heard == [f"the engine on the first node ({HOST}) died or cannot be reached"]


def test_strangers_and_late_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without the word is nobody's; a rank that does not come is named."""
    monkeypatch.setattr(lifelines, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(lifelines, "STRANGER_SECONDS", 0.2)
    lines = Lifelines(HOST)
    host, port, _ = lines.address
    hold((host, port, "guessed"), 1, 1, lambda cause: None)
    with socket.create_connection((host, port)), pytest.raises(TimeoutError, match="rank 1 of"):
        lines.accept([1])


def test_a_first_node_that_cannot_be_reached() -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConnectionError, match="rank 1 cannot reach the first node"):
            hold((HOST, port, ""), 1, 1, lambda cause: None)


# Two network namespaces, as two machines, and the link between them, which is then taken down.
CUT = """
set -e
unshare -n sleep 100 & other=$!
trap "kill $other" EXIT
within="nsenter -t $other -n"
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add veth_a type veth peer name veth_b
ip link set dev veth_b netns $other
ip addr add 10.9.0.1/24 dev veth_a
ip link set dev veth_a up
$within ip addr add 10.9.0.2/24 dev veth_b
$within ip link set dev veth_b up
"$1" -c "$2" > "$4" & first=$!
until [ -s "$4" ]; do sleep 0.1; done
$within "$1" -c "$3" $(cat "$4") & second=$!
sleep 8
kill -0 $first $second
date +%s
$within ip link set dev veth_b down
wait $second $first
date +%s
"""
FIRST = """
import threading
from vllm_dllm.vllm_patches.lifelines import Lifelines

lines, lost = Lifelines("10.9.0.1"), threading.Event()
print(*lines.address, 1, flush=True)
lines.accept([1])
lines.watch(lost.set)
assert lost.wait(60)
"""


@pytest.mark.long
def test_a_link_that_is_cut(tmp_path: Path) -> None:
    """No process has died, so only the keepalive of each end can tell."""
    if subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make network namespaces, and the command ip")
    arguments = [sys.executable, FIRST, CHILD, str(tmp_path / "address")]
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", CUT, "bash", *arguments],
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cut, heard, noticed = done.stdout.splitlines()
    assert heard == "'the engine on the first node (10.9.0.1) died or cannot be reached'"
    assert 5 <= int(noticed) - int(cut) <= 30
