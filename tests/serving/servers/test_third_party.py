"""Packages of others beside this one, over HTTP: an algorithm, and a plugin for LLaDA2."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.packages import pip_install
from tests.support.plugins import OTHER_DLLM, distribution
from tests.support.server import Server

pytestmark = pytest.mark.e2e

PACKAGE = ROOT / "tests" / "packages" / "half_at_a_time"
FILES = ("half_at_a_time.py", "pyproject.toml")
QUESTION = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 32}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PACKAGE, FILES, tmp_path_factory)


@pytest.mark.long
def test_installed_algorithm_over_http(installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    with Server(TINY_LLADA2, log=tmp_path / "log", env={"PYTHONPATH": path}) as server:

        def ask(**options: object) -> tuple[str, float]:
            before = server.metric("vllm:diffusion_num_denoising_steps_total")
            response = server.post("/v1/chat/completions", **QUESTION, vllm_xargs=options)
            assert response.status_code == 200, response.text
            steps = server.metric("vllm:diffusion_num_denoising_steps_total") - before
            return response.json()["choices"][0]["message"]["content"], steps

        name = {"diffusion_algorithm": "HalfAtATime"}
        answer, steps = ask(**name, diffusion_share=0.25)
        assert answer == "14 35 61 88"
        assert ask(**name, diffusion_share=1.0)[1] < steps, "all at once is one step a block"
        counters = server.client.get("/metrics").text
        own = r'^vllm:diffusion_finished_requests_by_algorithm_total\{algorithm="HalfAtATime",'
        assert re.findall(own + r".*\} (.*)$", counters, re.MULTILINE) == ["2.0"]
        wrong = {"diffusion_algorithm": "HalfAtATime", "diffusion_share": 2}
        response = server.post("/v1/chat/completions", **QUESTION, vllm_xargs=wrong)
        assert response.status_code == 400
        assert "diffusion_share must be above 0 and at most 1" in response.text


@pytest.mark.long
def test_a_plugin_with_the_name_dllm(tmp_path: Path) -> None:
    """Both are loaded, and our class serves the model."""
    path = distribution(tmp_path / "installed", "dllm-plugin", "dllm", OTHER_DLLM)
    with Server(TINY_LLADA2, log=tmp_path / "log", env={"PYTHONPATH": path}) as server:
        response = server.post("/v1/chat/completions", **QUESTION)
        assert response.json()["choices"][0]["message"]["content"] == "14 35 61 88"


def test_the_docs_show_this_package() -> None:
    shown = (ROOT / "docs" / "adding_an_algorithm.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", shown, re.DOTALL)
    files = [(PACKAGE / name).read_text() for name in FILES]
    assert blocks == files
