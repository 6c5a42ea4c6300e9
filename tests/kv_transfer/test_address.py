"""Addresses: the same for the same tokens of the same model, and different for everything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from vllm_dllm.kv_transfer.address import page_addresses, weights_digest

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
