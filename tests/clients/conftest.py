from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.servers import serve
from tests.support.server import Server


@pytest.fixture(scope="session", params=["llada2", "gemma"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server a family; pytest runs all tests of one before those of the next."""
    log = tmp_path_factory.mktemp(request.param) / "log"
    with serve(request.param, log) as running:
        yield running
