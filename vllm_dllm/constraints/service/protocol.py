"""Messages between a process that compiles constraints and the process that asks it to.

Each message is its length, 8 bytes little endian, and then that many bytes. The first message
carries the vocabulary and the limits; each one after that carries a constraint. The first byte of
an answer says what kind of answer it is.
"""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits

HEADER = struct.Struct("<Q")
# How an answer begins.
DONE = b"+"  # an automaton follows
REFUSED = b"-"  # the reason follows why there is no automaton
COSTLY = b"$"  # the reason follows why the constraint costs too much
KILLED = b"!"  # nothing follows: somebody else killed the process that was compiling


def frame(payload: bytes) -> bytes:
    """A message with its length in front."""
    return HEADER.pack(len(payload)) + payload


def receive(stream: BinaryIO) -> bytes | None:
    """The next message, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None


def pack_greeting(vocabulary: Vocabulary, limits: CompileLimits) -> bytes:
    """The first message to a worker: what it must know before it compiles anything."""
    buffer = io.BytesIO()
    ends = np.array(vocabulary.ends, dtype=np.int64)
    np.savez(buffer, data=vocabulary.data, offsets=vocabulary.offsets, ends=ends)
    return _with_json_head(asdict(limits), buffer.getvalue())


def unpack_greeting(payload: bytes) -> tuple[Vocabulary, CompileLimits]:
    """The inverse of `pack_greeting`."""
    limits, arrays = _split_json_head(payload)
    with np.load(io.BytesIO(arrays), allow_pickle=False) as stored:
        ends = tuple(stored["ends"].tolist())
        return Vocabulary(stored["data"], stored["offsets"], ends), CompileLimits(**limits)


def pack_constraint(constraint: Constraint) -> bytes:
    """A message that carries a constraint; equal constraints give equal bytes."""
    return json.dumps(asdict(constraint)).encode()


def unpack_constraint(payload: bytes) -> Constraint:
    """The inverse of `pack_constraint`."""
    return Constraint(**json.loads(payload))


def _with_json_head(head: dict[str, Any], body: bytes) -> bytes:
    return frame(json.dumps(head).encode()) + body


def _split_json_head(payload: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = HEADER.unpack_from(payload)
    end = HEADER.size + size
    return json.loads(payload[HEADER.size : end]), payload[end:]
