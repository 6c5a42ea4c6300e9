"""What is made of a profile; the profile itself needs a GPU."""

from __future__ import annotations

from vllm_dllm.selftest.device_time import DeviceTime, summary


def test_kernels_that_overlap_count_once() -> None:
    first, second = ("a", 0.0, 2000.0), ("b", 1000.0, 3000.0)
    within, later = ("b", 1500.0, 1600.0), ("a", 7000.0, 8000.0)
    want = DeviceTime(2.0, 2.0, [("a", 1.0, 1.5), ("b", 1.0, 1.05)], 4.0)
    assert summary([later, within, second, first], calls=2, longest=2) == want
    assert summary([], calls=2, longest=2) == DeviceTime(0.0, 0.0, [], 0.0)
