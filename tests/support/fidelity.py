"""How far an engine is from its model's float32 reference: layer by layer, and in its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# From the output [tokens, hidden] of a layer to logits [tokens, vocabulary].
Head = Callable[[torch.Tensor], torch.Tensor]

# How often a layer rounds: two norms, queries with keys and values, rotary embedding, attention,
# its projection, gate with up, their product, down, the sum of experts, and two residual sums.
ROUNDINGS_PER_LAYER = 12


@dataclass(frozen=True)
class LayerError:
    """How far the output of a layer is from the reference's, see ``docs/fidelity.md``.

    The median token says what rounding does, and the worst one whether rounding sent a token to
    another expert. `likeliest` is the share of tokens with the same likeliest id.
    """

    median: float
    worst: float
    logits: float
    likeliest: float

    @classmethod
    @torch.no_grad()
    def of(cls, got: torch.Tensor, wanted: torch.Tensor, head: Head) -> LayerError:
        """The error of an output ``[tokens, hidden]`` of any dtype, computed in float32."""
        error = _rms(got.float() - wanted) / _rms(wanted)
        logits, wanted_logits = head(got.float()), head(wanted)
        of_logits = _rms(logits - wanted_logits) / wanted_logits.std(-1)
        return cls(
            median=float(error.median()),
            worst=float(error.max()),
            logits=float(of_logits.median()),
            likeliest=float((logits.argmax(-1) == wanted_logits.argmax(-1)).float().mean()),
        )


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return rows.pow(2).mean(-1).sqrt()


def rounding_budget(layer: int, dtype: torch.dtype, hidden_size: int) -> float:
    """The relative error that rounding alone explains in the output of a layer (from 1).

    Roundings are uniform up to half of the dtype's epsilon, and add in squares. A sum of products
    over the hidden size is rounded at every term in float32, in which it is accumulated. The whole
    is doubled, because a layer may amplify the error of what it reads.
    """
    roundings = layer * ROUNDINGS_PER_LAYER
    if dtype == torch.float32:
        roundings *= hidden_size
    return 2 * torch.finfo(dtype).eps / 2 * (roundings / 3) ** 0.5


@contextlib.contextmanager
def recorded(layers: Iterable[torch.nn.Module]) -> Iterator[list[list[torch.Tensor]]]:
    """Record what layers return: for each forward pass their outputs ``[tokens, hidden]``, float32.

    Some of vLLM's layers return two parts, of which the residual stream is the sum.
    """
    passes: list[list[torch.Tensor]] = []

    def hook(index: int) -> Callable[..., None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            if index == 0:
                passes.append([])
            parts = output if isinstance(output, tuple) else (output,)
            tensors = [part.float() for part in parts if isinstance(part, torch.Tensor)]
            passes[-1].append(torch.stack(tensors).sum(0).flatten(0, -2))

        return keep

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
