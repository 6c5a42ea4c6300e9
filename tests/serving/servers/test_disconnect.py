"""A client that leaves mid-block leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support import oracle
from tests.support.server import Server

pytestmark = pytest.mark.e2e


def leave_after_first_event(server: Server, prompt: list[int]) -> None:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"diffusion_threshold": 2.0},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        next(line for line in response.iter_lines() if line.startswith("data: {"))


def test_nothing_is_held(server: Server, golden: oracle.Checkpoint) -> None:
    prompt = golden.prompts["p33"].tokens
    expected = server.complete(prompt, 30, ignore_eos=True)
    # More of them than there are slots: a leaked slot would stop the last ones.
    for _ in range(20):
        leave_after_first_event(server, golden.prompts["p100"].tokens)
    server.wait_until_idle()
    assert server.complete(prompt, 30, ignore_eos=True) == expected


def test_others_do_not_notice(server: Server, golden: oracle.Checkpoint) -> None:
    prompts = [p.tokens for p in golden.prompts.values()][:8]
    alone = [server.complete(prompt, 60, ignore_eos=True)["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        leaving = [
            pool.submit(leave_after_first_event, server, golden.prompts["p100"].tokens)
            for _ in range(8)
        ]
        staying = [pool.submit(server.complete, prompt, 60, ignore_eos=True) for prompt in prompts]
        assert [future.result()["token_ids"] for future in staying] == alone
        for future in leaving:
            future.result()
    server.wait_until_idle()


@pytest.mark.long
def test_a_canvas_that_is_only_edited(server: Server, golden: oracle.Checkpoint) -> None:
    """Its client leaves, and it does not use up the steps that it was allowed."""
    steps = "vllm:diffusion_num_denoising_steps_total"
    options = {
        "diffusion_algorithm": "JointThreshold",
        "diffusion_threshold": 0.0,  # all masks in one step
        "diffusion_edit_threshold": 0.0,
        "diffusion_max_post_edit_steps": 32,
    }
    # Eight answers take far longer than the client waits, on a quick machine as well.
    body = {"model": "m", "prompt": [golden.prompts["p33"].tokens] * 8, "max_tokens": 400}
    body |= {"ignore_eos": True, "vllm_xargs": options}
    before = server.metric(steps)
    assert server.post("/v1/completions", **body).status_code == 200
    whole = server.metric(steps) - before
    assert whole > 10 * 400 / golden.block_size, "mostly edits"
    url = f"{server.url}/v1/completions"
    for streamed in (False, True):
        before = server.metric(steps)
        if streamed:  # events come faster than any time-out: leave after the first one
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
                assert next(response.iter_lines()).startswith("data:")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.3)
        server.wait_until_idle(5)
        assert server.metric(steps) - before < whole / 2
