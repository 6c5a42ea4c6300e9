"""Many prompts from a file of JSON lines into another, with a progress bar; goes on after a stop.

    .venv/bin/python -m examples.tiny.tasks --held-out 20 > problems.jsonl
    .venv/bin/python examples/offline_batch.py problems.jsonl answers.jsonl

Each line has a "prompt" or "messages"; the output repeats the line and adds an "answer". The
default is the tiny model of this repository, which knows these problems; `--model
inclusionAI/LLaDA2.0-mini` asks a real one.
"""

import argparse
import json
from pathlib import Path

from tqdm import tqdm
from vllm import LLM

from vllm_dllm.commands.prompt_file import conversation, read_prompts

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-llada2"
# For a laptop; leave them out on a GPU.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}


def main(llm: LLM, source: Path, target: Path, chunk: int, max_tokens: int) -> None:
    records = read_prompts(source)
    done = target.read_bytes().count(b"\n") if target.exists() else 0
    params = llm.get_default_sampling_params()
    params.max_tokens = max_tokens
    with target.open("a") as sink, tqdm(total=len(records), initial=done, unit="prompt") as bar:
        for start in range(done, len(records), chunk):
            part = records[start : start + chunk]
            outputs = llm.chat([*map(conversation, part)], params, use_tqdm=False)
            for record, output in zip(part, outputs, strict=True):
                answer = {"answer": output.outputs[0].text}
                sink.write(json.dumps(record | answer) + "\n")
            sink.flush()  # what is finished is kept when somebody stops this
            bar.update(len(part))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="lines that it has already are not asked again")
    parser.add_argument("--model", help="any diffusion model; default: tiny-llada2")
    parser.add_argument("--chunk", type=int, default=256, help="prompts at a time")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    args = parser.parse_args()
    llm = LLM(args.model) if args.model else LLM(str(TINY), **SMALL)
    main(llm, args.source, args.target, args.chunk, args.max_tokens)
