"""Random values that users may send: wrong kinds, and the last values that are still allowed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

# Cases of the fuzz tests in all. The long run: `VLLM_DLLM_FUZZ=50000 pytest tests/settings`.
CASES = int(os.environ.get("VLLM_DLLM_FUZZ", "3000"))
FLOAT32 = float.fromhex("0x1.fffffep+127")
STEPS = 65536


def share(part: float) -> int:
    """`max_examples` of a test that takes this part of all cases."""
    return max(10, round(CASES * part))


@dataclass(frozen=True)
class Number:
    """A number's range, written down here again so that the package's own can be wrong."""

    least: float = 0
    most: float = FLOAT32
    above: bool = False
    whole: bool = False

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        inside = value > self.least if self.above else value >= self.least
        return inside and value <= self.most

    def edges(self) -> st.SearchStrategy[Any]:
        """Inside, on the border, and next to it."""
        if self.whole:
            ends = [int(end) + n for end in (self.least, self.most) for n in (-1, 0, 1)]
            return st.sampled_from(ends) | st.integers(int(self.least), int(self.most))
        ends = [math.nextafter(e, to) for e in (self.least, self.most) for to in (-1e39, e, 1e39)]
        return st.sampled_from(ends) | st.floats(self.least, min(self.most, 100.0))


TEXTS = st.sampled_from(
    [
        *("", " ", "0.5", "1", "1e3", "nan", "true", "None"),
        *("\u0661", "½", "\0", "0x10", "🙂", "é" * 200),
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = (
    st.sampled_from(
        [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1]
    )
    | st.sampled_from([10**400, -(10**400), 0.0, -0.0, 1.0, 0.5, 1e39, 5e-324, 1e-46, 1.5e300])
    | st.sampled_from([math.nan, math.inf, -math.inf])
    | st.integers()
    | st.floats()
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
# Offline there is no JSON between the user and the parser.
OBJECTS = st.sampled_from(
    [b"1", 1j, Decimal("0.5"), Fraction(1, 2), (1,), {1}, object(), int, NotImplemented, range(3)]
) | st.just(10**5000)
WILD = JSON | OBJECTS


def misspelt(names: list[str]) -> st.SearchStrategy[str]:
    """A name with one letter doubled, dropped, swapped or changed."""

    def wrong(name: str, at: int, how: int) -> str:
        at %= len(name)
        letters = (name[at] * 2, "", name[at].upper(), "z")[how]
        return name[:at] + letters + name[at + 1 :]

    made = st.builds(wrong, st.sampled_from(names), st.integers(0, 40), st.integers(0, 3))
    return made.filter(lambda name: name not in names)


def same(given: object, parsed: object) -> bool:
    """Not merely equal: True is no 1 and 1 no 1.0."""
    return type(given) is type(parsed) and given == parsed


# Few draws meet each of these for each field, so every field is given all of them.
ALWAYS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-46, 5e-324, 1e39),
    *(math.nan, math.inf, -math.inf, FLOAT32, math.nextafter(FLOAT32, 1e39), 10**39, 10**400),
    *(STEPS - 1, STEPS, STEPS + 1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**5000),
    *("", " ", "1", "0.5", "nan", "true", "None", "\u0661", "os:getcwd", "EntropyBound", "sync"),
    *([], [0], [1, 2], [True], [0.0], ["1"], [-1], [[0]], [2**31], (0,), {}, {"a": 1}, b"1", 1j),
    *([1] * STEPS, [1] * (STEPS + 1), Decimal("0.5"), Fraction(1, 2), object, int),
)
