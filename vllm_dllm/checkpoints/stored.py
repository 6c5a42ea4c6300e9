"""The files of a checkpoint, read a second time where a tensor has come twice."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Lists the file of each tensor of a large checkpoint.
INDEX = "model.safetensors.index.json"


class StoredTensors:
    """The tensors in the safetensors files of a model.

    Nothing is read before a tensor comes twice, and then only its copies.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self.place = (model_config.model, model_config.revision)

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files that have a tensor of each name; those that an index leaves out do not count.

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

    def check_equal(self, first: str, second: str) -> None:
        """Check that two tensors, or all tensors of one name, are equal bit by bit.

        Raises:
            ValueError: they differ, or cannot be compared because they are not in local files.
        """
        copies = [self._bits(file, name) for name in {first, second} for file in self.files[name]]
        which = f"tensors {first!r} and {second!r}" if first != second else f"tensor {first!r}"
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
    def _bits(file: Path, name: str) -> torch.Tensor:
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor.flatten().view(torch.uint8)
