"""Files of pages: what is read is what was written, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_dllm.kv_transfer.page_files import (
    PageError,
    is_finite,
    load_page,
    page_of,
    save_page,
)

CACHES = {f"layer {n}": torch.randn(5, 2, 4, 6, dtype=torch.bfloat16) for n in range(3)}
PAGE = page_of(CACHES, 3)


def test_a_page_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "ab" / "a.safetensors"
    save_page(file, "a", PAGE)
    read = load_page(file, "a", PAGE)
    assert read.keys() == PAGE.keys()
    assert all(torch.equal(read[name], CACHES[name][3]) for name in CACHES)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def cut_off(file: Path, at: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * at)])


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-7] ^= 16
    file.write_bytes(content)


def of_other_layers(file: Path) -> None:
    save_page(file, "a", {name: PAGE[name] for name in list(PAGE)[:2]})


def of_another_type(file: Path) -> None:
    save_page(file, "a", {name: tensor.float() for name, tensor in PAGE.items()})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: cut_off(file, 0),
    "within the header": lambda file: cut_off(file, 0.1),
    "within the tensors": lambda file: cut_off(file, 0.9),
    "missing": Path.unlink,
    "no such format": lambda file: file.write_text("page"),
    "changed": changed,
    "another page": lambda file: save_page(file, "b", PAGE),
    "other layers": of_other_layers,
    "another type": of_another_type,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.safetensors"
    save_page(file, "a", PAGE)
    DAMAGES[damage](file)
    with pytest.raises(PageError):
        load_page(file, "a", PAGE)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "a.safetensors"
    taken.mkdir()
    with pytest.raises(OSError):
        save_page(taken, "a", PAGE)
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_seen(number: float) -> None:
    spoiled = {name: tensor.clone() for name, tensor in PAGE.items()}
    assert is_finite(spoiled)
    spoiled["layer 1"][0, 1, 2] = number
    assert not is_finite(spoiled)
