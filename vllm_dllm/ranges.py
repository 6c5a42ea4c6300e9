"""Numbers that users may set: their ranges, their defaults, and the errors that name them."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")
MAX_INT32 = 2**31 - 1
# Most denoise steps of a canvas. A float32 holds every whole number up to here, and an int32 holds
# sums of such numbers.
MAX_STEPS = 1 << 16


class SettingsError(ValueError):
    """A setting has an unknown name or a value outside its range; the message names it."""


# How much of a user's text an error message quotes: longer than any name.
MOST_CHARACTERS = 100


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MOST_CHARACTERS


def shown(value: object) -> str:
    """`repr` for an error message: short, and never an error itself."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write out a very long integer
        return f"a very large {type(value).__name__}"


def cut(text: str) -> str:
    """The beginning of a text, for an error message or a comparison."""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a user most probably meant, whatever its case; None if none is close."""
    folded = {one.casefold(): one for one in sorted(known, reverse=True)}
    close = difflib.get_close_matches(cut(name).casefold(), folded, n=1)
    return folded[close[0]] if close else None


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint for an error message: the closest known name, else all of them, with a prefix."""
    names = sorted(known)
    meant = closest(name, names)
    if meant is not None:
        return f"did you mean {prefix + meant!r}?"
    return f"known: {', '.join(prefix + name for name in names)}"


def listed(names: Iterable[str], word: str = "and") -> str:
    """Names as a sentence lists them: ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may take.

    Attributes:
        least: the smallest allowed number.
        most: the largest.
        above: `least` itself is excluded.
        whole: whole numbers only, that fit an int32.
        blocks: for a number of steps that a canvas' positions do not bound: a request may ask for
            this many times the canvas' length, see `DllmSettings.request_step_limit`.
        help: what the setting does, in one line.
    """

    least: float = 0.0
    most: float = MAX_FLOAT32
    above: bool = False
    whole: bool = False
    blocks: int | None = None
    help: str = ""

    def check(self, name: str, value: object) -> None:
        """Raise `SettingsError` unless `value` is a number in the range."""
        kind = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            what = "a whole number" if self.whole else "a number"
            raise SettingsError(f"{name} must be {what}, got {shown(value)}")
        most = min(self.most, MAX_INT32) if self.whole else self.most
        inside = self.least < value <= most if self.above else self.least <= value <= most
        if not inside:  # also refuses nan
            raise SettingsError(f"{name} must be {self}, got {shown(value)}")

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.least:g}"
        if self.most < (MAX_INT32 if self.whole else MAX_FLOAT32):
            return f"{lower} and at most {self.most:g}"
        return f"{'' if self.whole else 'finite and '}{lower} (and fit 32 bits)"


def setting(default: float, help: str, **limits: Any) -> Any:
    """A dataclass field with a range; `limits` are `Range`'s arguments.

    Whole numbers are limited to `MAX_STEPS`, unless `most` is given.
    """
    if limits.get("whole"):
        limits.setdefault("most", MAX_STEPS)
    return field(default=default, metadata={"range": Range(help=help, **limits)})


@dataclass(frozen=True)
class AlgorithmConfig:
    """Base of an algorithm's settings, a frozen dataclass of `setting` fields; checks ranges."""

    def __post_init__(self) -> None:
        for name, allowed in self.ranges().items():
            allowed.check(name, getattr(self, name))

    @classmethod
    @cache
    def ranges(cls) -> Mapping[str, Range]:
        """The settings' names and ranges; built once for each class."""
        return MappingProxyType({f.name: f.metadata["range"] for f in fields(cls)})

    def values(self) -> dict[str, float]:
        """The settings' names and values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
