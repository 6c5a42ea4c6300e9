"""Pages in files: what is read is what was written, or an error, and whose address is whose.

An address is the same for the same tokens of the same model, and different for everything else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from vllm_dllm.kv_transfer.pages import (
    PageError,
    is_finite,
    load_page,
    page_addresses,
    page_of,
    save_page,
    weights_digest,
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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: cut_off(file, 0),
    "within the header": lambda file: cut_off(file, 0.1),
    "within the tensors": lambda file: cut_off(file, 0.9),
    "missing": Path.unlink,
    "no such format": lambda file: file.write_text("page"),
    "changed": changed,
    "another page": lambda file: save_page(file, "b", PAGE),
    "other layers": lambda file: save_page(file, "a", dict(list(PAGE.items())[:2])),
    "another type": lambda file: save_page(file, "a", {n: t.float() for n, t in PAGE.items()}),
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


# ---- Addresses

TOKENS = list(range(100, 170))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (31, 0), (32, 1), (63, 1), (64, 2), (70, 2)])
def test_only_whole_pages_have_addresses(tokens: int, pages: int) -> None:
    assert len(page_addresses("server", None, TOKENS[:tokens], 32)) == pages


def test_an_address_depends_on_everything_before_it() -> None:
    first, second = page_addresses("server", None, TOKENS, 32)
    others = [
        *page_addresses("another server", None, TOKENS, 32),
        *page_addresses("server", "salt", TOKENS, 32),
        *page_addresses("server", "None", TOKENS, 32),
        *page_addresses("server", None, [1, *TOKENS[1:]], 32),
        *page_addresses("server", None, TOKENS[32:], 32),
    ]
    assert len({first, second, *others}) == 2 + len(others)
    changed_later = page_addresses("server", None, [*TOKENS[:40], 1, *TOKENS[41:]], 32)
    assert changed_later[0] == first and changed_later[1] != second


def test_weights_are_told_apart(tmp_path: Path) -> None:
    found = weights_digest(TINY_SDAR)
    assert found != weights_digest(TINY_LLADA2)
    copied = shutil.copytree(TINY_SDAR, tmp_path / "copied")
    assert weights_digest(copied) == found, "the place and the times of files do not matter"
    (file,) = copied.glob("*.safetensors")
    tensors = load_file(file)
    for name in list(tensors)[:: max(1, len(tensors) // 5)]:
        changed = tensors | {name: tensors[name] + torch.ones_like(tensors[name])}
        save_file(changed, file, {"format": "pt"})
        assert weights_digest(copied) != found, name


def test_a_checkpoint_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors files on this machine"):
        weights_digest(tmp_path)
