"""``vllm-dllm demo``: start a real server on this machine, send chat requests, stream the answers.

Without ``--model`` it serves ``tiny-llada2``, a model of 1.6 million parameters that was trained on
sums, lists and copies. It ships with the package.
"""

from __future__ import annotations

import argparse
import time

from vllm_dllm.commands.local_server import (
    SERVED_NAME,
    model_help,
    read_counter,
    serve,
    stream,
)

STEPS = "vllm:diffusion_num_denoising_steps_total"
PROMPTS = ("64 + 28", "sort 61 35 88 14", "reverse 52 97 23 71 40", "copy diffusion2026")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("--model", default="tiny-llada2", help=model_help())
    add("--prompt", action="append", help="may be repeated; default: four tasks")
    add("--max-tokens", type=int, default=96)


def run(args: argparse.Namespace) -> None:
    """Run the command; raises `ServerError`."""
    with serve(args.model) as url:
        for prompt in args.prompt or PROMPTS:
            chat(url, prompt, args.max_tokens)


def chat(url: str, prompt: str, max_tokens: int) -> None:
    """Send one chat request, and print the answer as it arrives and then a summary."""
    print(f"\nuser:      {prompt}\nassistant: ", end="", flush=True)
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    steps = read_counter(url, STEPS)
    begin = time.monotonic()
    tokens = 0
    for event in stream(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    seconds = time.monotonic() - begin
    steps = read_counter(url, STEPS) - steps
    rate = f"{tokens / steps:.2f} tokens per step, " if steps else ""
    passes = f"{steps:.0f} step" + ("" if steps == 1 else "s")
    print(f"\n           {tokens} tokens in {passes}: {rate}{seconds:.2f} s")
