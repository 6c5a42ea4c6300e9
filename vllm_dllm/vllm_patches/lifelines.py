"""Connections over which the nodes of one engine learn that another has died.

Each worker of another node holds a connection to the engine on the first node. Whoever dies closes
its end: the kernel does so for a killed process. A machine that is switched off or cut off is
noticed by TCP's keepalive. An end that was asked for, and a failure whose cause is known, is told
in a line before the connection is closed.

This module imports nothing of this package and nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable

# The last line of an engine that was asked to end. Any other line is the cause of its failure.
ENDED = "ended"
# A peer that acknowledges nothing is given up after FIRST + COUNT * BETWEEN seconds.
KEEPALIVE_FIRST, KEEPALIVE_BETWEEN, KEEPALIVE_COUNT = 5, 5, 3
# Seconds within which a worker that was told the address has to be there.
CONNECT_SECONDS = 30.0
# Seconds for whoever connects to say who it is.
STRANGER_SECONDS = 2.0
# A line that is longer is cut; the cause of a failure is no longer either.
MOST_BYTES = 4096


class Lifelines:
    """The first node's ends of the connections.

    Attributes:
        address: host, port and the word that a worker has to know, for `hold`.
    """

    def __init__(self, host: str) -> None:
        """Listen for workers. `host` is the address at which other nodes reach this one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self.address = (host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._held: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._lost: str | None = None
        self._something_lost = threading.Event()

    def accept(self, ranks: Iterable[int]) -> None:
        """Take the connections of these ranks, which have been told the address, and no others.

        Raises:
            TimeoutError: one of them has not come.
        """
        missing, deadline = set(ranks), time.monotonic() + CONNECT_SECONDS
        while missing:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, (host, *_) = self._listener.accept()
            except TimeoutError:
                raise TimeoutError(
                    f"no connection from rank {min(missing)} of another node: "
                    f"{self.address[0]} must be reachable from there; set VLLM_HOST_IP"
                ) from None
            connection.settimeout(STRANGER_SECONDS)
            word, rank, node, pid = (_read_line(connection) + "   ").split(" ")[:4]
            known = secrets.compare_digest(word.encode(), self.address[2].encode())
            if known and int(rank) in missing:
                missing.discard(int(rank))
                connection.settimeout(None)
                _keep_alive(connection)
                self._held[connection] = f"rank {rank} on node {node} ({host}, pid {pid})"
            else:
                connection.close()
        self._listener.close()

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call `on_loss` from a thread once a worker's connection has broken."""

        def wait() -> None:
            with selectors.DefaultSelector() as selector:
                for connection in self._held:
                    selector.register(connection, selectors.EVENT_READ)
                broken = selector.select()[0][0].fileobj
            who = self._held[broken]  # type: ignore[index]
            if self.lose(f"{who} died or cannot be reached; the log of its node says why"):
                on_loss()

        threading.Thread(target=wait, daemon=True, name="DllmLifelines").start()

    def lose(self, what: str) -> bool:
        """Note that the engine cannot go on, in one line. Returns whether it was to go on."""
        with self._lock:
            if self._ended or self._lost is not None:
                return False
            self._lost = what
        self._something_lost.set()
        return True

    def lost(self, seconds: float = 0) -> str | None:
        """What was lost, after waiting so long for something to be; None if nothing was."""
        self._something_lost.wait(seconds)
        return self._lost

    def end(self, cause: str | None) -> None:
        """Tell all workers that the engine ends. Only the first call has an effect.

        Args:
            cause: why it fails, in one line; None if it was asked to end.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
        line = (ENDED if cause is None else cause).encode()[: MOST_BYTES - 1] + b"\n"
        for connection in self._held:
            with contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.sendall(line)
                # Not closed: the selector of the other thread holds it. The process's end does.
                connection.shutdown(socket.SHUT_WR)


def hold(
    address: tuple[str, int, str], rank: int, node: int, on_end: Callable[[str | None], None]
) -> socket.socket:
    """Connect a worker to the engine on the first node.

    Args:
        address: see `Lifelines`.
        rank: of the worker in its engine.
        node: its node's number.
        on_end: called from a thread when the engine has ended: with None if it was asked to,
            otherwise with a line that says why it failed.

    Returns:
        the connection. To shut it down tells the engine that this worker ends.

    Raises:
        ConnectionError: the first node cannot be reached.
    """
    host, port, word = address
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionError(
            f"rank {rank} cannot reach the first node at {host}:{port} ({error}); "
            "set VLLM_HOST_IP there to an address that other nodes reach"
        ) from error
    connection.settimeout(None)
    _keep_alive(connection)
    connection.sendall(f"{word} {rank} {node} {os.getpid()}\n".encode())

    def wait() -> None:
        line = _read_line(connection)
        if line == ENDED:
            on_end(None)
        elif line:
            on_end(f"the engine on the first node died: {line}")
        else:
            on_end(f"the engine on the first node ({host}) died or cannot be reached")

    threading.Thread(target=wait, daemon=True, name="DllmLifeline").start()
    return connection


def _read_line(connection: socket.socket) -> str:
    """What comes up to the first line's end; empty if the connection breaks before it."""
    read = b""
    with contextlib.suppress(OSError):
        while not read.endswith(b"\n") and len(read) < MOST_BYTES:
            piece = connection.recv(1)
            if not piece:
                return ""
            read += piece
        return read.decode(errors="replace").strip()
    return ""


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_FIRST),
        ("TCP_KEEPINTVL", KEEPALIVE_BETWEEN),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
