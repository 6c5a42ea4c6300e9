"""Who is next, and what is kept: pure tables."""

from __future__ import annotations

from itertools import count

import pytest

from tests.constraints.helpers import compiled
from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.limits import BusyError, ConstraintError
from vllm_dllm.constraints.service.cache import CompiledConstraints
from vllm_dllm.constraints.service.turns import Client, Job, Ticket, Turns

NUMBERS = count()


def ticket(*client: str) -> Ticket:
    number = next(NUMBERS)
    name: Client = (client[0], client[1] if len(client) > 1 else "")
    job = Job(str(number).encode(), Constraint.of("regex", f"a{{{number}}}"))
    return Ticket(name, job, 0.0)


def order(turns: Turns) -> str:
    found = []
    while (taken := turns.take()) is not None:
        found.append("".join(taken.client))
    return " ".join(found)


def test_clients_take_turns() -> None:
    turns = Turns(100)
    for name in "aaabbc":
        turns.add(ticket(name))
    assert order(turns) == "a b c a b a"


def test_who_had_a_turn_lately_waits_for_the_others() -> None:
    """Even one who never has more than one waiting."""
    turns = Turns(100)
    for name in "abbb":
        turns.add(ticket(name))
    found = []
    for _ in range(6):
        taken = turns.take()
        assert taken is not None
        found.append(taken.client[0])
        if taken.client[0] == "a":
            turns.add(ticket("a"))
    assert found == list("abababab"[:6])


def test_invented_second_names_gain_nothing() -> None:
    turns = Turns(100)
    for n in range(4):
        turns.add(ticket("a", str(n)))
    for _ in range(4):
        turns.add(ticket("b"))
    assert order(turns) == "a0 b a1 b a2 b a3 b"


def test_the_barred_are_passed_over() -> None:
    turns = Turns(100)
    for name in "ab":
        turns.add(ticket(name))
    taken = turns.take({"a"})
    assert taken is not None and taken.client[0] == "b"
    assert turns.take({"a"}) is None
    assert turns.take() is not None


def test_the_queue_is_bounded_and_shared() -> None:
    turns = Turns(4)
    many = [ticket("a") for _ in range(4)]
    assert [turns.add(one) for one in many] == [None] * 4
    with pytest.raises(BusyError):
        turns.add(ticket("a"))
    assert turns.add(ticket("b")) is many[3]
    assert turns.add(ticket("b")) is many[2]
    with pytest.raises(BusyError):
        turns.add(ticket("b"))
    assert turns.add(ticket("c")) is not None
    assert len(turns.waiting) == 4


def test_refusals_cost_no_automaton_its_place() -> None:
    kept, found = CompiledConstraints(most_refusals=3), compiled("regex", "a|b")
    kept.put(b"good", found)
    for n in range(10):
        kept.put(str(n).encode(), ConstraintError(f"no {n}"))
    assert kept.get(b"good") is found
    assert [kept.get(str(n).encode()) is None for n in range(10)] == [True] * 7 + [False] * 3
    assert str(kept.get(b"9")) == "no 9"


def test_automata_are_kept_up_to_a_size() -> None:
    found = compiled("regex", "a|b")
    one = CompiledConstraints(most_bytes=1)
    for key in (b"a", b"b"):
        one.put(key, found)
    assert one.get(b"a") is None
    assert one.get(b"b") is found, "the latest is kept, whatever its size"
    both = CompiledConstraints()
    for key in (b"a", b"b"):
        both.put(key, found)
    assert both.get(b"a") is both.get(b"b") is found
