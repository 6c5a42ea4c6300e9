"""Compiling constraints in processes of their own, each constraint only once, clients in turn.

A hostile constraint may take for ever inside a library that cannot be interrupted; a process can be
stopped. So constraints are compiled in a few processes that know the vocabulary (`child`). What has
been found for a constraint, an automaton or a refusal, is there at once for the next who asks. What
says nothing about the constraint is a `BusyError` and is forgotten: a full queue, a busy machine, a
process that somebody killed. Nothing here runs on an engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future

from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import BusyError, ConstraintError, Limits
from vllm_dllm.constraints.service.cache import Kept
from vllm_dllm.constraints.service.process import LateError, LostError, Process
from vllm_dllm.constraints.service.protocol import (
    COSTLY,
    DONE,
    KILLED,
    pack_constraint,
    pack_greeting,
)
from vllm_dllm.constraints.service.turns import NOBODY, Client, Job, Ticket, Turns

logger = logging.getLogger("vllm.dllm")

Found = TokenAutomaton | ConstraintError | BusyError
CLOSED = "constraints are no longer compiled: the server is closing"
# Clients whose latest constraint was not too slow; so many are remembered.
MOST_QUICK = 1024
ATTEMPTS = 2


class Compiler:
    """Automata of constraints for one vocabulary. May be called from any thread.

    Each process has a thread that asks it. The last process that is free is only for clients whose
    latest constraint was not too slow, so nobody occupies all of them for long.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits | None = None, processes: int = 2
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or Limits()
        self._count = processes
        self._greeting = pack_greeting(vocabulary, self.limits)
        # Guards all below; whoever waits for any of it to change waits here.
        self._state = threading.Condition()
        self._kept = Kept()
        self._turns = Turns(self.limits.waiting)
        self._jobs: dict[bytes, Job] = {}
        self._running: Counter[str] = Counter()
        self._quick: OrderedDict[str, None] = OrderedDict()
        self._processes: list[Process] = []
        self._threads: list[threading.Thread] = []
        self._up = self._closed = False

    def warm(self) -> None:
        """Start the processes now, so that the first request does not wait for them."""
        with self._state:
            self._start_threads()

    def submit(self, constraint: Constraint, client: Client = NOBODY) -> Future[TokenAutomaton]:
        """The automaton, later; at once where it is known.

        The future raises `ConstraintError` where there is none, and `BusyError` where the client's
        turn did not come in time, or nothing was found out for a reason that may pass.

        Raises:
            BusyError: too many wait, or this is closed.
        """
        key = hashlib.sha256(pack_constraint(constraint)).digest()
        with self._state:
            known = self._kept.get(key)
            if known is not None:
                done: Future[TokenAutomaton] = Future()
                _tell(done, known)
                return done
            if self._closed:
                raise BusyError(CLOSED)
            job = self._jobs.get(key) or Job(key, constraint)
            for waiting in job.tickets:
                if waiting.client == client:
                    return waiting.future
            ticket = Ticket(client, job, time.monotonic() + self.limits.wait)
            left = None if job.running else self._turns.add(ticket)
            job.tickets.append(ticket)
            self._jobs[key] = job
            if left is not None:
                self._drop([left])
            self._start_threads()
            self._state.notify_all()
        if left is not None:
            _tell(left.future, BusyError("others wait for their constraints: busy, try again"))
        return ticket.future

    def compile(self, constraint: Constraint) -> TokenAutomaton:
        """The automaton, waited for.

        Raises:
            ConstraintError: it cannot be served.
            BusyError: see `submit`.
        """
        return self.submit(constraint).result()

    def close(self) -> None:
        """Stop the processes."""
        with self._state:
            self._closed = True
            busy, waiting = list(self._processes), self._turns.waiting
            self._drop(waiting)
            self._state.notify_all()
        for ticket in waiting:
            _tell(ticket.future, BusyError(CLOSED))
        for process in busy:
            process.kill()
        for thread in self._threads:
            thread.join()

    # ---- with the state's lock held

    def _start_threads(self) -> None:
        if self._threads or self._closed:
            return
        whats = [self._expire, *[self._serve] * self._count]
        self._threads = [
            threading.Thread(target=what, name=f"constraints-{n}", daemon=True)
            for n, what in enumerate(whats)
        ]
        for thread in self._threads:
            thread.start()

    def _drop(self, tickets: list[Ticket]) -> None:
        self._turns.leave(tickets)
        for ticket in tickets:
            ticket.job.tickets.remove(ticket)
            if not ticket.job.tickets:
                self._jobs.pop(ticket.job.key, None)

    def _barred(self) -> set[str]:
        """Who occupies all processes but one, and may not have the last one."""
        most = self._count - 1
        busy = {name for name, count in self._running.items() if most and count >= most}
        return busy - set(self._quick)

    # ---- the threads

    def _expire(self) -> None:
        """Tell tickets whose time is up."""
        while True:
            with self._state:
                if self._closed:
                    return
                now = time.monotonic()
                # A server that has yet to start its processes is not busy.
                tickets = self._turns.waiting if self._up else []
                late = [ticket for ticket in tickets if ticket.until <= now]
                if not late:
                    ends = [ticket.until - now for ticket in tickets]
                    self._state.wait(min(ends, default=None))
                    continue
                self._drop(late)
            for ticket in late:
                seconds = self.limits.wait
                problem = f"its turn to be compiled did not come within {seconds:g} seconds"
                _tell(ticket.future, BusyError(f"{problem}: busy, try again"))

    def _serve(self) -> None:
        """Compile what is next, until this is closed."""
        process = self._started()
        while (ticket := self._next()) is not None:
            try:
                found, process = self._found(ticket.job, process)
            except Exception as error:  # whatever it is, nobody shall wait for ever
                logger.exception("A constraint was not compiled.")
                found = BusyError(f"it was not compiled ({type(error).__name__}); try again")
            self._settle(ticket, found)
            # The next constraint shall not wait for its start.
            process = process or self._started()
        if process is not None:
            process.stop()

    def _next(self) -> Ticket | None:
        """Whose turn it is, waited for; None once this is closed."""
        with self._state:
            while not self._closed:
                ticket = self._turns.take(self._barred())
                if ticket is not None:
                    ticket.job.running = True
                    self._turns.leave(ticket.job.tickets)
                    self._running[ticket.client[0]] += 1
                    return ticket
                self._state.wait()
        return None

    def _found(self, job: Job, process: Process | None) -> tuple[Found, Process | None]:
        """What is found for a job, and the process if it is still there."""
        problem = "the process that compiles constraints did not start"
        for _ in range(ATTEMPTS):
            process = process or self._started()
            if process is None:
                break
            try:
                answer = process.ask(pack_constraint(job.constraint), self.limits.wall)
            except LateError:
                self._stop(process)
                problem = f"it was not compiled within {self.limits.wall:g} seconds"
                return _OverdueError(f"{problem}: the machine is busy, try again"), None
            except LostError:
                self._stop(process)
                process, answer = None, KILLED
            if answer[:1] != KILLED:
                return _read(answer), process
            logger.warning("A process that compiles constraints was killed from outside.")
            problem = "the process that compiled it was killed"
        return BusyError(CLOSED if self._closed else f"{problem}; busy, try again"), process

    def _settle(self, ticket: Ticket, found: Found) -> None:
        job, name = ticket.job, ticket.client[0]
        with self._state:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
            self._quick.pop(name, None)
            if not isinstance(found, _OverdueError | _CostlyError):
                self._quick[name] = None
                while len(self._quick) > MOST_QUICK:
                    self._quick.popitem(last=False)
            if not isinstance(found, BusyError):
                self._kept.put(job.key, found)
            del self._jobs[job.key]
            self._state.notify_all()
        for waiting in job.tickets:
            _tell(waiting.future, found)

    def _started(self) -> Process | None:
        """A new process, or None where it does not start or this is closed."""
        if self._closed:
            return None
        try:
            process = Process(self._greeting)
        except (LostError, OSError) as error:
            logger.warning("%s", error)
            return None
        with self._state:
            if not self._closed:
                if not self._up:
                    # Nobody was served before: waiting for a turn begins now.
                    self._up = True
                    for ticket in self._turns.waiting:
                        ticket.until = time.monotonic() + self.limits.wait
                self._processes.append(process)
                self._state.notify_all()
                return process
        process.stop()
        return None

    def _stop(self, process: Process) -> None:
        with self._state:
            if process in self._processes:
                self._processes.remove(process)
        process.stop()


class _CostlyError(ConstraintError):
    """A constraint that takes too much time or memory."""


class _OverdueError(BusyError):
    """A constraint that takes too much wall time."""


def _read(answer: bytes) -> TokenAutomaton | ConstraintError:
    if answer[:1] == DONE:
        return TokenAutomaton.from_bytes(answer[1:])
    kind = _CostlyError if answer[:1] == COSTLY else ConstraintError
    return kind(answer[1:].decode())


def _tell(future: Future[TokenAutomaton], found: Found) -> None:
    if isinstance(found, TokenAutomaton):
        future.set_result(found)
    else:
        future.set_exception(found)
