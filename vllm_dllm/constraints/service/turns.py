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
    from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton

# Who asks. The second name is of no account beyond the first: those with the same first name take
# turns with one another in the turn of that name, so it is no use to invent second names.
Client = tuple[str, str]
NOBODY: Client = ("", "")
# Clients whose last turn is remembered.
REMEMBERED = 1024


@dataclass(eq=False)
class Job:
    """A constraint that is compiled once, for all who wait for it.

    Attributes:
        key: what the constraint is kept under.
        constraint: what is compiled.
        running: it is being compiled.
        tickets: who waits for it.
    """

    key: bytes
    constraint: Constraint
    running: bool = False
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(eq=False)
class Ticket:
    """One client who waits for one constraint.

    Attributes:
        client: who waits.
        job: the constraint.
        until: when the client gives up waiting for its turn, by `time.monotonic`.
        future: what the client is told.
    """

    client: Client
    job: Job
    until: float
    future: Future[TokenAutomaton] = field(default_factory=Future)


class Turns:
    """Tickets that wait, at most ``most``. Not for several threads at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: list[Ticket] = []
        self._last: OrderedDict[Client | str, int] = OrderedDict()
        self._turn = 0

    def add(self, ticket: Ticket) -> Ticket | None:
        """Let a ticket wait; where there is no room, in place of one whose client has many.

        Returns:
            The ticket that had to leave, if one had to.

        Raises:
            BusyError: there is no room, and nobody has more waiting than the newcomer.
        """
        left = None
        if len(self.waiting) >= self.most:
            counts = Counter(one.client[0] for one in self.waiting)
            most, count = counts.most_common(1)[0] if counts else ("", 0)
            if counts[ticket.client[0]] + 1 >= count:
                raise BusyError("too many constraints wait to be compiled: busy, try again")
            left = next(one for one in reversed(self.waiting) if one.client[0] == most)
            self.waiting.remove(left)
        self.waiting.append(ticket)
        return left

    def take(self, barred: Collection[str] = ()) -> Ticket | None:
        """The ticket whose turn it is: of the client who has waited longest for a turn.

        Args:
            barred: first names of clients whose turn it is not.
        """
        free = [one for one in self.waiting if one.client[0] not in barred]
        if not free:
            return None
        last = self._last
        taken = min(free, key=lambda t: (last.get(t.client[0], -1), last.get(t.client, -1)))
        self.waiting.remove(taken)
        self._turn += 1
        for name in (taken.client[0], taken.client):
            last[name] = self._turn
            last.move_to_end(name)
        while len(last) > REMEMBERED:
            last.popitem(last=False)
        return taken

    def leave(self, tickets: Collection[Ticket]) -> None:
        """Let tickets wait no longer."""
        self.waiting = [one for one in self.waiting if one not in tickets]
