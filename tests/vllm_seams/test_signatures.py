"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.child import in_child
from tests.vllm_seams import signatures
from tests.vllm_seams.signatures import PAGE, RECORD, flat, installed
from vllm_dllm.vllm_seams import versions


@pytest.mark.slow
def test_signatures() -> None:
    """Look at what changed and why, then record it: see the docstring of `signatures`."""
    recorded = recorded_now()[installed()]
    found, missing = in_child(signatures.checked, list(recorded["wrapped"]))
    assert missing == [], "imports, also inside functions"
    assert found == recorded, "record it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    names = {name.rpartition(".")[2].rpartition(":")[2] for name in recorded["wrapped"]}
    assert signatures.wraps() <= names


def recorded_now() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def test_every_supported_release_is_recorded() -> None:
    assert list(recorded_now()) == [*versions.TESTED]


def test_the_page_has_every_wrap_and_every_name_belongs_to_a_seam() -> None:
    """So that `docs/seams.md` says what of vLLM the package touches, and which releases have it."""
    page, record = PAGE.read_text("utf-8"), recorded_now()
    wrapped = {name for names in record.values() for name in names["wrapped"]}
    table = page.partition("\n## Wrapped\n")[2].partition("\n## ")[0]
    named = [name for seam in signatures.seams(table) for name in seam.names]
    assert sorted(named) == sorted(name.partition(":")[2] for name in wrapped)
    assert f"wraps {len(wrapped)} functions" in page
    names = {name for of_release in record.values() for name in flat(of_release)}
    found, without = signatures.by_seam(page, sorted(names))
    assert without == []
    assert [seam.names for seam, of_seam in found.items() if not of_seam] == []
    assert signatures.with_releases(page, record) == page, (
        "write it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    )
