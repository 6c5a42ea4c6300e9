"""Cases of a test of which some are quick, and the others repeat a property."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, single values or tuples; those that are not quick are long tests."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=", ".join(map(str, case)) if isinstance(case, tuple) else str(case),
            marks=() if case in quick else pytest.mark.long,
        )
        for case in cases
    ]
