"""Whose constraint is compiled next: clients take turns, however many each one sends."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_dllm.constraints.limits import BusyError

if TYPE_CHECKING:
    from vllm_dllm.constraints.automaton.compilation import Constraint
    from vllm_dllm.constraints.automaton.compiled import CompiledConstraint

# Who asks: a first and a second name. Turns are shared out between first names. Those with the same
# first name share that name's turns, so inventing second names gains nothing.
Client = tuple[str, str]
NOBODY: Client = ("", "")
# Number of clients whose last turn is remembered.
REMEMBERED = 1024


@dataclass(eq=False)
class Job:
    """A constraint that is compiled once for everybody who waits for it.

    Attributes:
        key: what its verdict is cached under.
        constraint: what to compile.
        running: whether it is being compiled now.
        tickets: who waits for it.
    """

    key: bytes
    constraint: Constraint
    running: bool = False
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(eq=False)
class Ticket:
    """One client that waits for one constraint.

    Attributes:
        client: who waits.
        job: the constraint.
        until: when the client stops waiting for its turn, on the clock of `time.monotonic`.
        future: receives the automaton, or the error.
    """

    client: Client
    job: Job
    until: float
    future: Future[CompiledConstraint] = field(default_factory=Future)


class Turns:
    """A queue of at most `most` tickets, from which clients are served in turn. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: list[Ticket] = []
        self._last_turn: OrderedDict[Client | str, int] = OrderedDict()
        self._turn = 0

    def add(self, ticket: Ticket) -> Ticket | None:
        """Add a ticket. In a full queue it replaces the newest one of whoever has the most.

        Returns:
            The ticket that was removed to make room, if any.

        Raises:
            BusyError: the queue is full, and nobody has more tickets waiting than this client.
        """
        removed = None
        if len(self.waiting) >= self.most:
            counts = Counter(queued.client[0] for queued in self.waiting)
            name, count = counts.most_common(1)[0] if counts else ("", 0)
            if counts[ticket.client[0]] + 1 >= count:
                raise BusyError("too many constraints wait to be compiled: busy, try again")
            removed = next(queued for queued in reversed(self.waiting) if queued.client[0] == name)
            self.waiting.remove(removed)
        self.waiting.append(ticket)
        return removed

    def take(self, barred: Collection[str] = ()) -> Ticket | None:
        """Remove and return the ticket of the client whose last turn is longest ago.

        Args:
            barred: first names of clients that must wait for now.
        """
        free = [ticket for ticket in self.waiting if ticket.client[0] not in barred]
        if not free:
            return None
        last = self._last_turn
        chosen = min(free, key=lambda t: (last.get(t.client[0], -1), last.get(t.client, -1)))
        self.waiting.remove(chosen)
        self._turn += 1
        for name in (chosen.client[0], chosen.client):
            last[name] = self._turn
            last.move_to_end(name)
        while len(last) > REMEMBERED:
            last.popitem(last=False)
        return chosen

    def remove(self, tickets: Collection[Ticket]) -> None:
        """Remove those of the tickets that are still waiting."""
        self.waiting = [ticket for ticket in self.waiting if ticket not in tickets]
