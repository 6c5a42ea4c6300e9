"""Refuse offline beam search, which vLLM would run over canvases with a meaningless result.

Over HTTP the front end refuses it, see `FrontEnd.take`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_dllm.frontend import front_end_of
from vllm_dllm.vllm_seams.wrapping import wrap


def refuse_offline() -> None:
    """Refuse ``LLM.beam_search`` for our models if vLLM has imported it."""
    offline = sys.modules.get("vllm.entrypoints.generate.beam_search.offline")
    if offline is not None:
        wrap(offline.BeamSearchOfflineMixin, "beam_search", _refuse_for_our_models)


def _refuse_for_our_models(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_dllm.frontend.admission import refuse_beam_search

    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if front_end_of(self.llm_engine.input_processor) is not None:
            refuse_beam_search()
        return original(self, *args, **kwargs)

    return beam_search
