"""Checkpoints of one file or many: tensors read one at a time, and written in bounded files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


class Source:
    """The tensors of a checkpoint of one file or many, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        index = path / INDEX
        if index.exists():
            files = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(path / "model.safetensors", framework="pt") as file:
                files = dict.fromkeys(file.keys(), "model.safetensors")
        self._open = {name: safe_open(path / name, framework="pt") for name in set(files.values())}
        self.files: dict[str, str] = files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._open[self.files[name]].get_tensor(name)

    def matrices(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of one tensor; of all experts' matrices if it holds them together."""
        tensor = self[name]
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
                yield f"{prefix}.gate_proj.weight", gate
                yield f"{prefix}.up_proj.weight", up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down
        else:
            yield name, tensor


class Writer:
    """Safetensors files of bounded size, with an index if there are several."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.files, self.held, self.bytes, self.total = out, [], {}, 0, 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.bytes + size > SHARD_BYTES:
            self._write()
        self.held[name] = tensor.contiguous()
        self.bytes += size
        self.total += size

    def _write(self) -> None:
        file = self.out / f"part-{len(self.files) + 1:05d}.safetensors"
        save_file(self.held, file, {"format": "pt"})
        self.files.append((file, list(self.held)))
        self.held, self.bytes = {}, 0

    def close(self) -> None:
        self._write()
        if len(self.files) == 1:
            self.files[0][0].rename(self.out / "model.safetensors")
            return
        places = {}
        for number, (file, names) in enumerate(self.files, 1):
            target = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            file.rename(self.out / target)
            places |= dict.fromkeys(names, target)
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self.out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
