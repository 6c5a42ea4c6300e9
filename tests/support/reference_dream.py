"""DreamReasoner's reference: SDAR's, with the rules of its own, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import reference, reference_sdar
from tests.support.random_weights import state

MASK, END = reference_sdar.MASK, reference_sdar.END


@dataclass(frozen=True)
class Rule(reference.Rule):
    """By default the published one; a static rule fills a block in one step."""

    name: str = "LowConfidenceDynamic"

    def __post_init__(self) -> None:
        if self.name == "LowConfidenceStatic" and self.steps is None:
            object.__setattr__(self, "steps", 1)

    def options(self) -> dict[str, Any]:
        given = super().options()
        return {"diffusion_algorithm": self.name} if self == Rule("LowConfidenceStatic") else given


class Reference(reference.Reference):
    def __init__(self, path: Path) -> None:
        self.model, stated = reference.load(path, "Qwen3")
        self.model.double()
        self.mask, self.block = stated["mask_token_id"], stated["block_size"]


def random_checkpoint(path: Path, block: int) -> Path:
    reference_sdar.random_checkpoint(path, experts=False, block=block)
    state(path, architectures=["DreamForCausalLM"], model_type="Dream")
    return path
