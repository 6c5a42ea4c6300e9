"""Layouts on paper: what each device computes, sends and holds, by hand and in its limits."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import layouts as paper
from benchmarks import scaling
from benchmarks.floor import floor
from benchmarks.layouts import FLASH, GEMMA, MODELS, Layout
from benchmarks.memory import UnevenError, parameter_bytes, table_bytes, unquantized
from benchmarks.tables import TABLES

BOTH = list(MODELS.values())


@pytest.mark.parametrize("model", BOTH, ids=list(MODELS))
@pytest.mark.parametrize("requests", [1, 16])
def test_one_device_is_the_floor(model: paper.Model, requests: int) -> None:
    found = paper.step(model, Layout(), requests, 1024)
    least = floor(model.geometry, requests, 1024)
    assert found.read == pytest.approx(least.weight_bytes + least.cache_bytes)
    assert found.operations == pytest.approx(least.operations)
    assert 1e3 * found.seconds == pytest.approx(least.milliseconds)
    assert found.communicating == found.nvlink == found.network == 0


@pytest.mark.parametrize("model", BOTH, ids=list(MODELS))
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_devices_of_a_rank_compute_what_one_does(model: paper.Model, tensor: int) -> None:
    """Together they do the same operations, but for routers and self-conditioning, done by all."""
    alone = paper.step(model, Layout(), 16, 1024)
    split = paper.step(model, Layout(tensor), 16, 1024)
    assert alone.operations <= tensor * split.operations < 1.1 * alone.operations
    assert alone.read <= tensor * split.read < 1.2 * alone.read


@pytest.mark.parametrize("model", BOTH, ids=list(MODELS))
def test_a_group_reads_every_expert_once(model: paper.Model) -> None:
    """With so many tokens that all are chosen, ranks that share experts read them once."""
    group = 8
    shared = paper.step(model, Layout(1, group), 64, 0)
    alone = paper.step(model, Layout(), 64, 0)
    geometry = model.geometry
    experts = 2 * geometry.moe_layers * geometry.experts * 3 * geometry.hidden * geometry.width
    assert alone.read - shared.read == pytest.approx(experts * (1 - 1 / group), rel=1e-3)
    assert shared.operations == pytest.approx(alone.operations)


def test_all_reduce_by_hand() -> None:
    assert paper.all_reduce_bytes(100, 1) == 0
    assert paper.all_reduce_bytes(100, 2) == 100
    assert paper.all_reduce_bytes(100, 4) == 150
    found = paper.step(FLASH, Layout(4), 1, 0)
    sums = 2 * 32 + 1  # after attention and experts of each layer, and the embedding
    assert found.nvlink == sums * 1.5 * 32 * 4096 * 2
    assert found.network == 0
    assert found.waits == pytest.approx(sums * paper.NVLINK_WAIT)


def test_experts_of_other_devices() -> None:
    assert paper.others_reached(1, 8) == 0
    assert paper.others_reached(2, 1) == 0.5
    assert paper.others_reached(10**6, 8) == pytest.approx(8, rel=1e-3)
    near, far = paper.exchange(FLASH, Layout(1, 8), 10)
    assert far == 0
    assert near == pytest.approx(2 * 2 * 4096 * 10 * 7 * (1 - (7 / 8) ** 8))
    near, far = paper.exchange(FLASH, Layout(1, 16), 10)
    assert far == pytest.approx(2 * 2 * 4096 * 10 * (1 - 0.5**8))
    # The devices of a rank share its tokens.
    assert paper.exchange(FLASH, Layout(2, 8), 10)[1] == pytest.approx(far / 2)


@pytest.mark.parametrize("group", [2, 8, 64])
def test_to_all_is_never_less_than_to_those_with_an_expert(group: int) -> None:
    layout = Layout(1, group)
    found = paper.step(FLASH, layout, 16, 0)
    assert paper.exchange_with_all(FLASH, layout, 16 * 32) >= found.nvlink > 0
    assert (found.network > 0) == (group > paper.NODE)
    assert paper.exchange_with_all(FLASH, Layout(8), 16 * 32) == 0


@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_layouts_use_all_devices_once(devices: int) -> None:
    found = list(paper.layouts(devices))
    assert {layout.devices for layout in found} == {devices}
    assert len(set(found)) == len(found)
    assert max(layout.tensor for layout in found) == min(devices, paper.NODE)
    assert Layout(replicas=devices) in found and Layout(1, devices, 1) in found


def test_names_of_layouts() -> None:
    assert str(Layout()) == "1 x 1 device"
    assert str(Layout(2, 4, 8)) == "tensor 2, expert 8, 8 x"
    assert str(Layout(4)) == "tensor 4, 1 x"


@pytest.mark.parametrize("model", BOTH, ids=list(MODELS))
def test_weights_of_a_device(model: paper.Model) -> None:
    """As docs/models.md has them without a group; with one, the experts are shared out."""
    whole = parameter_bytes(model.geometry, unquantized()) + table_bytes(model.geometry)
    assert paper.weight_bytes(model, Layout()) == whole
    bare = replace(model.geometry, width=0)
    rest = parameter_bytes(bare, unquantized()) + table_bytes(model.geometry)
    assert paper.weight_bytes(model, Layout(1, 8)) == pytest.approx(rest + (whole - rest) / 8)


def test_what_fits() -> None:
    """LLaDA2.0-flash has 206 GB of weights, so that it takes two devices of 141 GB."""
    assert not paper.fits(FLASH, Layout(), 1, 1024)
    assert paper.fits(FLASH, Layout(2), 1, 1024)
    assert paper.fits(FLASH, Layout(1, 2), 1, 1024)
    assert not paper.fits(GEMMA, Layout(3), 1, 1024)  # 16 heads over 3 devices
    with pytest.raises(UnevenError):
        paper.step(FLASH, Layout(1, 512), 1, 0)  # 256 experts


@pytest.mark.parametrize("model", BOTH, ids=list(MODELS))
def test_the_best_layouts_keep_their_targets(model: paper.Model) -> None:
    found = list(scaling.points(model, 8, 1024))
    free = scaling.best_per_gpu(found, 0)
    fastest = scaling.best_per_user(found, 0)
    assert free and fastest
    assert free.gpu == max(point.gpu for point in found)
    assert fastest.user == max(point.user for point in found)
    bound = scaling.best_per_gpu(found, 0.9 * fastest.user)
    assert bound and bound.user >= 0.9 * fastest.user and bound.gpu <= free.gpu
    assert scaling.best_per_gpu(found, 1.1 * fastest.user) is None
    for point in found:
        seats = point.requests * point.layout.devices / point.layout.tensor
        assert point.gpu * point.layout.devices == pytest.approx(point.user * seats)


def test_more_devices_are_never_worse_for_a_user() -> None:
    speeds = []
    for devices in scaling.DEVICES[1:]:
        best = scaling.best_per_user(scaling.points(FLASH, devices, 1024), 0)
        assert best
        speeds.append(best.user)
    assert speeds == sorted(speeds)


def test_the_script_writes_what_the_tables_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scaling.json"
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--devices", "1", "2", "--json", str(path)])
    scaling.main()
    results = json.loads(path.read_text())["results"]
    assert "| LLaDA2.0-flash | tensor 2, 1 x |" in capsys.readouterr().out
    for name in ("scaling_bytes", "scaling_memory", "scaling_user_llada2", "scaling_gpu_gemma"):
        rows = list(TABLES[name].rows(results))
        assert len({len(row) for row in rows}) == 1 and len(rows) > 2
    assert results["assumptions"]["nvlink"] == paper.NVLINK
