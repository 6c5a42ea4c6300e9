"""Messages between the process that compiles constraints and the one that asks it to."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import Limits

HEADER = struct.Struct("<Q")
# How an answer begins: an automaton; why there is none; why it costs too much; nothing, because the
# process at work was killed by somebody else.
DONE, REFUSED, COSTLY, KILLED = b"+", b"-", b"$", b"!"


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


def pack_greeting(vocabulary: Vocabulary, limits: Limits) -> bytes:
    """What a process must know before it compiles anything."""
    buffer = io.BytesIO()
    ends = np.array(vocabulary.ends, dtype=np.int64)
    np.savez(buffer, data=vocabulary.data, offsets=vocabulary.offsets, ends=ends)
    return _joined(asdict(limits), buffer.getvalue())


def unpack_greeting(payload: bytes) -> tuple[Vocabulary, Limits]:
    """The inverse of `pack_greeting`."""
    limits, rest = _parted(payload)
    with np.load(io.BytesIO(rest), allow_pickle=False) as stored:
        ends = tuple(stored["ends"].tolist())
        return Vocabulary(stored["data"], stored["offsets"], ends), Limits(**limits)


def pack_constraint(constraint: Constraint) -> bytes:
    """A constraint to compile."""
    return json.dumps(asdict(constraint)).encode()


def unpack_constraint(payload: bytes) -> Constraint:
    """The inverse of `pack_constraint`."""
    return Constraint(**json.loads(payload))


def _joined(head: dict[str, Any], rest: bytes) -> bytes:
    return frame(json.dumps(head).encode()) + rest


def _parted(payload: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = HEADER.unpack_from(payload)
    behind = HEADER.size + size
    return json.loads(payload[HEADER.size : behind]), payload[behind:]
