"""What a trainer adds to vLLM's workers to send them weights."""

from __future__ import annotations

from typing import Any

import torch


class Receiver:
    """A `worker_extension_cls` like those of verl, TRL and OpenRLHF."""

    model_runner: Any

    def receive(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        self.model_runner.model.load_weights(weights=bucket)
