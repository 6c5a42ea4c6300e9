"""The files of a checkpoint, which are read a second time when a tensor comes twice."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# The index that lists the file of each tensor in a large checkpoint.
INDEX = "model.safetensors.index.json"


class StoredTensors:
    """The tensors in the safetensors files of a model.

    Nothing is read until a tensor larger than a single number comes twice, and then only its
    copies.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self.place = (model_config.model, model_config.revision)

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files that contain each tensor, by its name; files that an index omits do not count.

        Empty for a checkpoint that is not in local files.
        """
        from vllm.transformers_utils.repo_utils import try_get_local_file

        config = try_get_local_file(self.place[0], "config.json", self.place[1])
        found: dict[str, list[Path]] = defaultdict(list)
        if not isinstance(config, Path):
            return found
        index = config.with_name(INDEX)
        files = {file.name for file in config.parent.glob("*.safetensors")}
        if index.exists():
            files &= set(json.loads(index.read_text())["weight_map"].values())
        for file in sorted(config.with_name(name) for name in files):
            with safe_open(file, framework="pt") as opened:
                for name in list(opened.keys()):
                    found[name].append(file)
        return found

    def check_equal(self, first: Came, second: Came) -> None:
        """Check that two copies of a tensor, or all of one name, are bitwise equal.

        Raises:
            ValueError: they differ, or cannot be compared because they are not in local files.
        """
        which = f"tensors {first.name!r} and {second.name!r}"
        if first.name == second.name:
            which = f"tensor {first.name!r}"
        if first.number is not None and second.number is not None:
            copies = [_bits(first.number), _bits(second.number)]
        else:
            names = {first.name, second.name}
            copies = [self._bits_in(file, name) for name in names for file in self.files[name]]
        if len(copies) < 2:
            raise ValueError(
                f"{which}: there are two copies of a tensor, which can be compared in safetensors "
                "files only; remove one of them from the checkpoint"
            )
        if not all(torch.equal(copies[0], other) for other in copies[1:]):
            raise ValueError(
                f"{which}: the checkpoint has two copies of a tensor, and they differ; remove the "
                "wrong one, or make them equal"
            )

    @staticmethod
    def _bits_in(file: Path, name: str) -> torch.Tensor:
        with safe_open(file, framework="pt") as opened:
            return _bits(opened.get_tensor(name))


class Came(NamedTuple):
    """A tensor that the loader has received.

    DiffusionGemma's authors store one number of each layer twice, so single numbers are kept.
    """

    name: str
    number: torch.Tensor | None

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Came:
        """Record a tensor received under a name."""
        return Came(name, tensor.clone() if tensor.numel() == 1 else None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
