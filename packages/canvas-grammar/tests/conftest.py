"""Settings of the suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples every time, so that a failure seen once is seen again.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
