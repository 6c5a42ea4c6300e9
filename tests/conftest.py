"""Settings of the whole suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.server import Server

# Two busy cores make any single example slow now and then; that is no finding. The same
# examples every time, so that a failure seen once is seen again.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
Server.forks = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first; each stays together, in its own order."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
