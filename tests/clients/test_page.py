"""docs/clients.md: every client of its table has code."""

from __future__ import annotations

from tests.support.clients.servers import ADDRESS, MODEL, blocks, table

BLOCKS, TABLE = blocks(), table()


def test_every_client_has_a_row_and_code() -> None:
    headings = [name.replace("`, `", "` and `") for name in TABLE]
    assert headings == list(BLOCKS)
    for block in BLOCKS.values():
        assert (ADDRESS in block.text and MODEL in block.text) or "vllm chat" in block.text
