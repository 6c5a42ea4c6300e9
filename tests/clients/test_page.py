"""docs/clients.md: every client of its table has code, which belongs to an installed version."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.support.clients.page import ADDRESS, MODEL, ROOT, blocks, table

BLOCKS, TABLE = blocks(), table()
# Clients in the environment of vLLM, by the distribution that has them.
BESIDE_VLLM = {
    "OpenAI": "openai",
    "Anthropic": "anthropic",
    "LangChain": "langchain-openai",
    "Pydantic AI": "pydantic-ai-slim",
    "`vllm chat`, `vllm complete`": "vllm",
    "`vllm bench serve`": "vllm",
}
# Those in an environment of their own.
APART = {
    "LiteLLM": "litellm",
    "Instructor": "instructor",
    "Outlines": "outlines",
    "lm-eval": "lm-eval[api]",
    "guidellm": "guidellm",
}


def test_every_client_has_a_row_and_code() -> None:
    headings = [name.replace("`, `", "` and `") for name in TABLE]
    assert headings == list(BLOCKS)
    assert {*BESIDE_VLLM, *APART} == set(TABLE)
    for block in BLOCKS.values():
        assert (ADDRESS in block.text and MODEL in block.text) or "vllm chat" in block.text


@pytest.mark.parametrize("client", BESIDE_VLLM)
def test_the_version_beside_vllm(client: str) -> None:
    """A new installation may have a later one of the same major version."""
    version = metadata.version(BESIDE_VLLM[client])
    assert version.split(".")[0] == TABLE[client]["version"].split(".")[0]


@pytest.mark.parametrize("client", APART)
def test_the_version_apart(client: str) -> None:
    wanted = (ROOT / "tests" / "clients" / "requirements.txt").read_text("utf-8")
    assert f"{APART[client]}=={TABLE[client]['version']}" in wanted
