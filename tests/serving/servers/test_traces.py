"""Traces over HTTP: in whole answers, and refused where there is no place for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Server
from vllm_dllm import cli

pytestmark = pytest.mark.e2e

QUESTION = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 40}
ALL = {"diffusion_return_step_maps": True, "diffusion_trace": True, "diffusion_replay": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def choices(llada2: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    response = llada2.post(path, return_token_ids=True, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_answers(path: str, llada2: Server) -> None:
    body = {"prompt": ["12 + 5", "64 + 28"], "max_tokens": 20} if path == COMPLETIONS else QUESTION
    plain = choices(llada2, path, **body, n=2, temperature=0.5, seed=3)
    traced = choices(llada2, path, **body, n=2, temperature=0.5, seed=3, vllm_xargs=ALL)
    assert len(traced) == (4 if path == COMPLETIONS else 2)
    for without, choice in zip(plain, traced, strict=True):
        tokens = choice["token_ids"]
        assert tokens == without["token_ids"]
        assert not {"step_maps", "diffusion_trace"} & without.keys()
        assert len(choice["step_maps"]) == len(tokens)
        assert choice["diffusion_trace"]["step_maps"] == choice["step_maps"]
        assert choice["dllm_stop_length"] == len(tokens)
        assert choice["dllm_replay_token_ids"][: len(tokens)] == tokens
        assert choice["dllm_replay_contract_version"] == 1


def test_answers_to_token_ids(llada2: Server) -> None:
    sampling = {"max_tokens": 8, "extra_args": ALL}
    answer = llada2.post("/inference/v1/generate", token_ids=[5, 6], sampling_params=sampling)
    (choice,) = answer.json()["choices"]
    assert len(choice["step_maps"]) == len(choice["token_ids"])


def test_refusals(llada2: Server) -> None:
    asked = {"diffusion_trace": True}
    for path, body in (("/v1/responses", {"input": "12 + 5"}), ("/v1/messages", QUESTION)):
        response = llada2.post(path, **body, vllm_xargs=asked)
        assert response.status_code == 400
        assert "diffusion_trace has no effect at this endpoint" in response.text
    for path, body in ((COMPLETIONS, {"prompt": "12 + 5"}), (CHAT, QUESTION)):
        response = llada2.post(path, **body, vllm_xargs=asked, stream=True)
        assert response.status_code == 400
        assert "diffusion_trace is not supported with stream" in response.text
    both = {"diffusion_replay": True, "diffusion_stream_prefix": True}
    response = llada2.post(CHAT, **QUESTION, vllm_xargs=both)
    assert response.status_code == 400
    assert "remove one of them" in response.text
    response = llada2.post(CHAT, **QUESTION, vllm_xargs={"diffusion_trace": 2})
    assert response.status_code == 400
    assert "diffusion_trace must be true or false" in response.text


def test_watch_and_its_page(
    llada2: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`vllm-dllm watch` shows every pass of an answer, and writes a page with the same."""
    page = tmp_path / "out.html"
    question = "sort 61 35 88 14"
    command = ["watch", "m", question, "--url", llada2.url, "--no-color", "--html", str(page)]
    assert cli.main([*command, "--algorithm", "Sequential"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "14 35 61 88" in "".join(lines[:-1]), "at its end, in as many lines as it takes"
    data = re.search(r'id="traces">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None
    (line,) = json.loads(data[1])
    assert line["name"] == question
    passes = [each for block in line["trace"]["blocks"] for each in block["passes"]]
    assert lines[-1].startswith(f"all: {len(passes)} passes, ")
    assert sum("denoise: " in each for each in lines) == sum(p["kind"] == "denoise" for p in passes)
    assert cli.main(["watch", "no-such-model", question, "--url", llada2.url]) == 1
    assert "no-such-model" in capsys.readouterr().err
