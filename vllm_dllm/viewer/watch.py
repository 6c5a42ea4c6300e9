"""``vllm-dllm watch``: show in the terminal how an answer was denoised.

The trace comes with the whole answer, which is then shown pass by pass, slowly enough to follow.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

from vllm_dllm.commands.local_server import SERVED_NAME, model_help, post, serve
from vllm_dllm.viewer.page import answer_of, page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("model", help=f"{model_help()}; with --url the name that it serves")
    add("prompt")
    add("--url", help="of a running server, http://HOST:PORT; without it one is started")
    add("--max-tokens", type=int, default=96)
    add("--algorithm", help="the decoding algorithm; default: the server's")
    add("--no-color", action="store_true", help="mark what is new by brackets")
    add("--html", type=Path, metavar="FILE", help="write a page that shows the same")


def run(args: argparse.Namespace) -> None:
    """Send the request, and show each block of the answer; raises `ServerError`."""
    # Imported only here, so that other commands do not wait for it.
    from rich.console import Console

    from vllm_dllm.viewer.terminal import Screen

    with contextlib.nullcontext(args.url) if args.url else serve(args.model) as address:
        url, model = address.rstrip("/"), args.model if args.url else SERVED_NAME

        @functools.cache
        def text_of(token: int) -> str:
            answer = post(f"{url}/detokenize", {"model": model, "tokens": [token]})
            return str(answer["prompt"])

        console = Console(no_color=args.no_color, highlight=False, soft_wrap=False)
        screen = Screen(console, text_of)
        options: dict[str, Any] = {"diffusion_trace": True}
        if args.algorithm:
            options["diffusion_algorithm"] = args.algorithm
        body = {
            "model": model,
            "messages": [{"role": "user", "content": args.prompt}],
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "vllm_xargs": options,
        }
        (choice,) = post(f"{url}/v1/chat/completions", body)["choices"]
        trace: dict[str, Any] = choice["diffusion_trace"]
        for number, block in enumerate(trace["blocks"]):
            screen.show(number, block)
        screen.end()
        if args.html is not None:
            args.html.write_text(page([answer_of(args.prompt, trace, text_of)]), encoding="ascii")
