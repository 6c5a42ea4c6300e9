"""What is fuzzed, how it is served for that, and the plain vLLM that failures are compared with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import Server
from tests.support.soak.models import adapter_flags, chosen, frontend_flags
from tests.support.tiny_llama import write_tiny_llama

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints of development
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # answers that can be asked for later
}
# Everything that opens an endpoint, or more of one.
OPEN = (
    *("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-prompt-tokens-details"),
    *("--trust-request-chat-template",),
    *("--enable-server-load-tracking", "--enable-force-include-usage"),
    "--log-error-stack",
)
KNOWN: Sequence[Mapping[str, Any]] = tuple(
    {"model": "m", "return_token_ids": True, "max_tokens": 40, "ignore_eos": True} | one
    for one in (
        {"prompt": "sort 61 35 88 14", "temperature": 0, "seed": 7},
        {"prompt": "count from 12 to 16", "temperature": 0.9, "seed": 11, "top_p": 0.9, "n": 2},
        {
            "prompt": "copy ab",
            "temperature": 0,
            "seed": 3,
            "structured_outputs": {"regex": "[ab]+"},
        },
    )
)


def server_of(name: str, log: Path) -> Server:
    """A server of one of the soak's models, not started yet."""
    model = chosen(name)
    adapters = model.adapters[:1]
    flags = (*OPEN, *frontend_flags(model.reasoning), *model.flags)
    beside = adapter_flags(model.path, adapters, log.parent)
    return Server(model.path, *flags, *beside, log=log, env=ENVIRONMENT)


def plain_server(scratch: Path) -> Server:
    """Stock vLLM without plugins, serving an ordinary causal model with the same tokenizer."""
    model = scratch / "plain"
    if not (model / "model.safetensors").exists():
        _write_plain(model)
    environment = ENVIRONMENT | {"VLLM_PLUGINS": ""}
    flags = (*OPEN, *frontend_flags("granite"))
    return Server(model, *flags, log=scratch / "plain.log", env=environment)


def _write_plain(folder: Path) -> None:
    write_tiny_llama(folder, 272, 2048, bos_token_id=256, eos_token_id=257)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_LLADA2 / name, folder / name)
