"""A request in the process that takes it: admission and structured output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_dllm.frontend.request_hooks import FrontEnd

# The attribute of vLLM's input processor that holds the `FrontEnd` of a diffusion model.
FRONT_END = "dllm_front_end"


def front_end_of(input_processor: Any) -> FrontEnd | None:
    """The `FrontEnd` of vLLM's input processor; None if it has none or is itself None."""
    front_end: FrontEnd | None = getattr(input_processor, FRONT_END, None)
    return front_end
