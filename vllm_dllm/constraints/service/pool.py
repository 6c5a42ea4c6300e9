"""A pool of processes that compile constraints, each constraint only once and clients in turn.

A hostile constraint may keep a library busy that cannot be interrupted, but a process can be
killed. So constraints are compiled in a few worker processes (`service.worker`) that know the
vocabulary. The verdict on a constraint, an automaton or a refusal, is cached, and whoever asks for
the same constraint gets it at once. A `BusyError` is no verdict and is not cached: the queue was
full, the machine was busy, or somebody killed the process. Nothing here runs on an engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future

from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.compiled import CompiledConstraint
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import BusyError, CompileLimits, ConstraintError
from vllm_dllm.constraints.service.cache import CompiledConstraints
from vllm_dllm.constraints.service.process import (
    AnswerLateError,
    ProcessLostError,
    WorkerProcess,
)
from vllm_dllm.constraints.service.protocol import (
    COSTLY,
    DONE,
    KILLED,
    pack_constraint,
    pack_greeting,
)
from vllm_dllm.constraints.service.turns import NOBODY, Client, Job, Ticket, Turns

logger = logging.getLogger("vllm.dllm")

Outcome = CompiledConstraint | ConstraintError | BusyError
CLOSED = "constraints are no longer compiled: the server is closing"
# Number of clients that are remembered because their latest constraint was not too slow.
MOST_QUICK = 1024
ATTEMPTS = 2


class CompilerPool:
    """Compiles constraints for one vocabulary. Thread-safe.

    Each worker process is driven by a thread of its own. The last free one is reserved for clients
    whose latest constraint was not too slow, so that no client occupies all of them for long.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: CompileLimits | None = None, processes: int = 2
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or CompileLimits()
        self._count = processes
        self._greeting = pack_greeting(vocabulary, self.limits)
        # Guards everything below. Threads wait on it for any change of it.
        self._state = threading.Condition()
        self._verdicts = CompiledConstraints()
        self._turns = Turns(self.limits.most_waiting)
        self._jobs: dict[bytes, Job] = {}
        self._running: Counter[str] = Counter()
        self._quick: OrderedDict[str, None] = OrderedDict()
        self._processes: list[WorkerProcess] = []
        self._threads: list[threading.Thread] = []
        self._up = self._closed = False

    def warm(self) -> None:
        """Start the processes now, so that the first request does not wait for them."""
        with self._state:
            self._start_threads()

    def submit(self, constraint: Constraint, client: Client = NOBODY) -> Future[CompiledConstraint]:
        """A future of the automaton; it is done at once where the verdict is cached.

        The future raises `ConstraintError` if the constraint cannot be served, and `BusyError` if
        the client's turn did not come in time or there is no verdict for a reason that may pass.

        Raises:
            BusyError: too many constraints are waiting, or the pool is closed.
        """
        key = hashlib.sha256(pack_constraint(constraint)).digest()
        with self._state:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                resolved: Future[CompiledConstraint] = Future()
                _resolve(resolved, verdict)
                return resolved
            if self._closed:
                raise BusyError(CLOSED)
            job = self._jobs.get(key) or Job(key, constraint)
            for waiting in job.tickets:
                if waiting.client == client:
                    return waiting.future
            ticket = Ticket(client, job, time.monotonic() + self.limits.turn_seconds)
            removed = None if job.running else self._turns.add(ticket)
            job.tickets.append(ticket)
            self._jobs[key] = job
            if removed is not None:
                self._drop([removed])
            self._start_threads()
            self._state.notify_all()
        if removed is not None:
            _resolve(
                removed.future, BusyError("others wait for their constraints: busy, try again")
            )
        return ticket.future

    def close(self) -> None:
        """Stop the processes. Constraints that are not compiled yet get a `BusyError`."""
        with self._state:
            self._closed = True
            busy, waiting = list(self._processes), self._turns.waiting
            self._drop(waiting)
            self._state.notify_all()
        for ticket in waiting:
            _resolve(ticket.future, BusyError(CLOSED))
        for process in busy:
            process.kill()
        for thread in self._threads:
            thread.join()

    # ---- called with the lock held

    def _start_threads(self) -> None:
        if self._threads or self._closed:
            return
        targets = [self._expire, *[self._serve] * self._count]
        self._threads = [
            threading.Thread(target=target, name=f"constraints-{n}", daemon=True)
            for n, target in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def _drop(self, tickets: list[Ticket]) -> None:
        """Remove tickets, and jobs that nobody waits for any more."""
        self._turns.remove(tickets)
        for ticket in tickets:
            ticket.job.tickets.remove(ticket)
            if not ticket.job.tickets:
                self._jobs.pop(ticket.job.key, None)

    def _barred(self) -> set[str]:
        """Clients that occupy all processes but one and may not have the last one."""
        most = self._count - 1
        busy = {name for name, count in self._running.items() if most and count >= most}
        return busy - set(self._quick)

    # ---- the threads

    def _expire(self) -> None:
        """Resolve tickets whose turn did not come in time, until the pool is closed."""
        while True:
            with self._state:
                if self._closed:
                    return
                now = time.monotonic()
                # A server whose processes are still starting is not busy: nobody's time is up.
                tickets = self._turns.waiting if self._up else []
                late = [ticket for ticket in tickets if ticket.until <= now]
                if not late:
                    remaining = [ticket.until - now for ticket in tickets]
                    self._state.wait(min(remaining, default=None))
                    continue
                self._drop(late)
            for ticket in late:
                seconds = self.limits.turn_seconds
                problem = f"its turn to be compiled did not come within {seconds:g} seconds"
                _resolve(ticket.future, BusyError(f"{problem}: busy, try again"))

    def _serve(self) -> None:
        """Compile one constraint after the other, until the pool is closed."""
        process = self._start_process()
        while (ticket := self._next_ticket()) is not None:
            try:
                outcome, process = self._compile(ticket.job, process)
            except Exception as error:  # whatever the error is, nobody may wait for ever
                logger.exception("A constraint was not compiled.")
                outcome = BusyError(f"it was not compiled ({type(error).__name__}); try again")
            if isinstance(outcome, CompiledConstraint) and outcome.facts.ignored:
                logger.info("%s", outcome.facts.remark())
            self._finish(ticket, outcome)
            # Start a new process now rather than when the next constraint waits for it.
            process = process or self._start_process()
        if process is not None:
            process.stop()

    def _next_ticket(self) -> Ticket | None:
        """Wait for a ticket and return it; None once the pool is closed."""
        with self._state:
            while not self._closed:
                ticket = self._turns.take(self._barred())
                if ticket is not None:
                    ticket.job.running = True
                    self._turns.remove(ticket.job.tickets)
                    self._running[ticket.client[0]] += 1
                    return ticket
                self._state.wait()
        return None

    def _compile(
        self, job: Job, process: WorkerProcess | None
    ) -> tuple[Outcome, WorkerProcess | None]:
        """The outcome of a job, and the process if it is still there."""
        problem = "the process that compiles constraints did not start"
        for _ in range(ATTEMPTS):
            process = process or self._start_process()
            if process is None:
                break
            try:
                answer = process.ask(pack_constraint(job.constraint), self.limits.wall_seconds)
            except AnswerLateError:
                self._stop_process(process)
                problem = f"it was not compiled within {self.limits.wall_seconds:g} seconds"
                return _OverdueError(f"{problem}: the machine is busy, try again"), None
            except ProcessLostError:
                self._stop_process(process)
                process, answer = None, KILLED
            if answer[:1] != KILLED:
                return _verdict(answer), process
            logger.warning("A process that compiles constraints was killed from outside.")
            problem = "the process that compiled it was killed"
        return BusyError(CLOSED if self._closed else f"{problem}; busy, try again"), process

    def _finish(self, ticket: Ticket, outcome: Outcome) -> None:
        """Cache a verdict, and resolve everybody who waits for it."""
        job, name = ticket.job, ticket.client[0]
        with self._state:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
            self._quick.pop(name, None)
            if not isinstance(outcome, _OverdueError | _CostlyError):
                self._quick[name] = None
                while len(self._quick) > MOST_QUICK:
                    self._quick.popitem(last=False)
            if not isinstance(outcome, BusyError):
                self._verdicts.put(job.key, outcome)
            del self._jobs[job.key]
            self._state.notify_all()
        for waiting in job.tickets:
            _resolve(waiting.future, outcome)

    def _start_process(self) -> WorkerProcess | None:
        """A new process, or None if it does not start or the pool is closed."""
        if self._closed:
            return None
        try:
            process = WorkerProcess(self._greeting)
        except (ProcessLostError, OSError) as error:
            logger.warning("%s", error)
            return None
        with self._state:
            if not self._closed:
                if not self._up:
                    # Until now nobody could be served: waiting for a turn begins here.
                    self._up = True
                    for ticket in self._turns.waiting:
                        ticket.until = time.monotonic() + self.limits.turn_seconds
                self._processes.append(process)
                self._state.notify_all()
                return process
        process.stop()
        return None

    def _stop_process(self, process: WorkerProcess) -> None:
        with self._state:
            if process in self._processes:
                self._processes.remove(process)
        process.stop()


class _CostlyError(ConstraintError):
    """The constraint takes too much CPU time or memory."""


class _OverdueError(BusyError):
    """The compilation took too much wall time."""


def _verdict(answer: bytes) -> CompiledConstraint | ConstraintError:
    if answer[:1] == DONE:
        return CompiledConstraint(answer[1:])
    kind = _CostlyError if answer[:1] == COSTLY else ConstraintError
    return kind(answer[1:].decode())


def _resolve(future: Future[CompiledConstraint], outcome: Outcome) -> None:
    if isinstance(outcome, CompiledConstraint):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
