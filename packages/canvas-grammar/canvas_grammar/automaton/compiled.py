"""A compiled constraint on its way from the process that compiled it to the worker."""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from canvas_grammar.automaton.configurations import Configurations
from canvas_grammar.automaton.pushdown import PushdownTables
from canvas_grammar.limits import ConstraintError

HEAD_SIZE = struct.Struct("<I")
TABLE = "table."
MOST_SAID = 8  # ignored keywords that the log names, for each constraint
# The fastest level: higher ones take several times as long to save another third.
COMPRESSION = 1


@dataclass(frozen=True)
class Facts:
    """What a front end needs to know about a constraint."""

    minimum: int  # number of tokens that suffice for an output, including the one that ends it
    depth: int  # how deeply calls of rules may nest
    ignored: tuple[str, ...] = ()  # unknown keywords of a schema, with their places

    def remark(self) -> str:
        """A line for the log that names the keywords without effect."""
        said = ", ".join(self.ignored[:MOST_SAID])
        unsaid = len(self.ignored) - MOST_SAID
        more = f" and {unsaid} more" if unsaid > 0 else ""
        # Clients choose the names, which must not begin new lines of the log.
        said = said.encode("unicode_escape").decode()
        return f"Keywords of a schema have no effect, because they are unknown: {said}{more}."


class CompiledConstraint:
    """A constraint compiled for one tokenizer, packed as plain arrays: reading it runs no code.

    Attributes:
        facts: what a front end needs to know about it.
        packed: `facts`, the tables, and the states that have been found already.
    """

    def __init__(self, packed: bytes) -> None:
        (size,) = HEAD_SIZE.unpack_from(packed)
        self._begin = HEAD_SIZE.size + size
        head = json.loads(packed[HEAD_SIZE.size : self._begin])
        self.facts = Facts(head["minimum"], head["depth"], tuple(head["ignored"]))
        self.packed = packed

    @classmethod
    def pack(cls, facts: Facts, configurations: Configurations) -> CompiledConstraint:
        """Pack a constraint, with the states that have been found already."""
        tables = configurations.tables
        arrays: dict[str, Any] = {TABLE + f.name: getattr(tables, f.name) for f in fields(tables)}
        arrays |= configurations.snapshot()
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        head = json.dumps(asdict(facts)).encode()
        body = zlib.compress(buffer.getvalue(), level=COMPRESSION)
        return cls(HEAD_SIZE.pack(len(head)) + head + body)

    def configurations(self) -> Configurations:
        """The states of the constraint; a new object with every call."""
        body = zlib.decompress(self.packed[self._begin :])
        with np.load(io.BytesIO(body), allow_pickle=False) as stored:
            arrays = dict(stored)
        tables = PushdownTables(**{f.name: arrays.pop(TABLE + f.name)
                                   for f in fields(PushdownTables)})  # fmt: skip
        found = Configurations(tables, self.facts.depth)
        found.restore(arrays)
        return found

    @property
    def minimum(self) -> int:
        """The number of tokens that suffice for an output, including the one that ends it."""
        return self.facts.minimum

    def require(self, budget: int) -> None:
        """Refuse a token budget that is too small for any output."""
        if budget < self.minimum:
            raise ConstraintError(
                f"the constraint needs at least {self.minimum} tokens with this model's tokenizer "
                f"(the end-of-sequence token included), but only {budget} may be generated"
            )
