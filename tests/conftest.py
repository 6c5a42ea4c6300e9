"""Settings of the whole suite."""

from __future__ import annotations

import logging

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


@pytest.fixture
def package_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the package logs, which vLLM's loggers do not pass on to pytest."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # else the first engine would undo what follows
    logger = logging.getLogger("vllm.dllm")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level("INFO", logger="vllm.dllm")
    return caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first; each stays together, in its own order."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
