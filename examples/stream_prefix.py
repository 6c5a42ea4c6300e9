r"""Streamed answers: by whole blocks, and by the decided beginning of each block.

    vllm serve examples/tiny/checkpoints/tiny-llada2 --enforce-eager --max-model-len 1024 \
      --kv-cache-memory-bytes 256M
    .venv/bin/python examples/stream_prefix.py

With a real masked model (LLaDA2, SDAR) serve that one instead, as usual. Each `|` in the output is
the end of a piece that the server sent. `diffusion_stream_prefix` changes when tokens arrive, not
which.
"""

import argparse
import time

from openai import OpenAI


def stream(client: OpenAI, prompt: str, max_tokens: int, **options: float) -> None:
    """Ask, and show each piece as it comes."""
    begin = time.monotonic()
    pieces = first = 0
    events = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"vllm_xargs": options},
    )
    for event in events:
        if event.choices and (text := event.choices[0].delta.content):
            first = first or time.monotonic() - begin
            pieces += 1
            print(text, end="|", flush=True)
    seconds = time.monotonic() - begin
    print(f"\n  {pieces} pieces, the first after {first:.2f} s, all after {seconds:.2f} s\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", default="copy thequickbrownfoxjumps2026")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threshold", type=float, default=1.0, help="1: one token at each step")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")
    for prefix in (0, 1):
        print("with diffusion_stream_prefix:" if prefix else "whole blocks:")
        options = {"diffusion_threshold": args.threshold, "diffusion_stream_prefix": prefix}
        stream(client, args.prompt, args.max_tokens, **options)
