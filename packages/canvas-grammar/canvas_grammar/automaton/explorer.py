"""A process that finds parts of constraints, while the engine that asks for them goes on.

Finding a part takes tens of milliseconds of Python, and in a thread it would hold the interpreter's
lock. The process is ``python -m canvas_grammar.automaton.explorer DESCRIPTOR``; it starts with the
first question, and ends with the `Explorer` or with the parent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.parts import Part, Parts
from canvas_grammar.automaton.tables import Tables
from canvas_grammar.pool import start_process


@dataclass(frozen=True)
class Question:
    """What `Parts.find` is asked; or None for a state if the constraint is to be forgotten."""

    key: int  # of the constraint
    constraint: tuple[bytes, int] | None  # packed, and the length of canvases, in the first one
    state: int | None
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    classes: bool = False  # whether they are wanted


@dataclass(frozen=True)
class Answer:
    """What `Parts.find` has found."""

    part: Part  # on the host
    place: int
    first: int  # the state for which the part may be used again
    classes: Tables | None  # if they were wanted
    nbytes: int  # what the constraint takes in the process


class Explorer:
    """Asks the process. What cannot be found raises a `RuntimeError` in the future."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Any] = SimpleQueue()  # with futures, or None to end
        self._keys = count()
        self.lives = [0]  # how many processes have ended, and with them all that they knew
        known = self._questions, self.lives  # not this object, so that it can end
        threading.Thread(target=_ask, args=known, name="explorer", daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def ask(self, question: Question) -> Future[Answer]:
        """Ask a question, without waiting. Questions are answered in order."""
        future: Future[Answer] = Future()
        self._questions.put((question, future))
        return future

    def new_key(self, owner: object) -> int:
        """A key for a constraint that is forgotten with its owner."""
        key = next(self._keys)
        weakref.finalize(owner, self._questions.put, (Question(key, None, None), Future()))
        return key


def _ask(questions: SimpleQueue[Any], lives: list[int]) -> None:
    process = connection = None
    while (asked := questions.get()) is not None:
        question, future = asked
        try:
            if connection is None:
                process, connection = start_process("canvas_grammar.automaton.explorer")
            connection.send(question)
            answer = connection.recv()
        except Exception as error:  # whatever the error is, no request may wait forever
            lives[0], connection = lives[0] + 1, None
            answer = f"the process that finds parts of constraints has ended: {error!r}"
        if isinstance(answer, str):
            future.set_exception(RuntimeError(answer))
        else:
            future.set_result(answer)
        asked = question = future = None  # an error knows who has waited, who must not live on here
    if process is not None and connection is not None:
        connection.close()
        process.wait()


def main() -> None:
    """Answer questions until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    known: dict[int, Parts] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            question = connection.recv()
            try:
                answer: Any = _answer(known, question)
            except Exception:
                answer = traceback.format_exc()
            connection.send(answer)


def _answer(known: dict[int, Parts], question: Question) -> Answer | None:
    if question.state is None:
        known.pop(question.key, None)
        return None
    if question.constraint is not None:
        packed, length = question.constraint
        known[question.key] = Parts(CompiledConstraint(packed), length)
    parts = known[question.key]
    part, place = parts.find(question.state, question.before, question.after)
    first = START if part is parts.part() else int(part.states[0])
    return Answer(part, place, first, parts.classes if question.classes else None, parts.nbytes)


if __name__ == "__main__":  # its own classes must have the names that the parent knows
    from canvas_grammar.automaton import explorer

    explorer.main()
