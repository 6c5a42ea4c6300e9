"""Profile what a GPU does during a few calls of a function, with PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class DeviceTime:
    """Means of a call.

    Attributes:
        kernels: kernels, copies and fills.
        busy_ms: milliseconds in which at least one of them ran. Times between them are not given,
            because the profiler makes launches slower: subtract `busy_ms` from an unprofiled time.
        longest: the kernels that took longest in all: name, number and milliseconds.
        longest_gap_ms: the longest time between two kernels, under the profiler.
    """

    kernels: float
    busy_ms: float
    longest: list[tuple[str, float, float]]
    longest_gap_ms: float


def device_time(call: Callable[[], object], calls: int, longest: int = 0) -> DeviceTime | None:
    """Profile a function; None without a CUDA device.

    Args:
        call: the function; it may return before the device is done.
        calls: how many times it is called.
        longest: how many kernels are named.
    """
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return summary(events, calls, longest)


def summary(events: Iterable[tuple[str, float, float]], calls: int, longest: int) -> DeviceTime:
    """Reduce events, each with its name, its beginning and its end in microseconds."""
    in_order = sorted(events, key=lambda event: event[1:])
    busy, gap, until = 0.0, 0.0, in_order[0][1] if in_order else 0.0
    by_name: dict[str, tuple[int, float]] = {}
    for name, begin, end in in_order:
        number, took = by_name.get(name, (0, 0.0))
        by_name[name] = number + 1, took + end - begin
        gap = max(gap, begin - until)
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    ranked = sorted(by_name.items(), key=lambda item: -item[1][1])[:longest]
    return DeviceTime(
        len(in_order) / calls,
        busy / 1e3 / calls,
        [(name, number / calls, took / 1e3 / calls) for name, (number, took) in ranked],
        gap / 1e3,
    )
