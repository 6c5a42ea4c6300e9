"""Count this repository's modules that are loaded after one greedy chat answer of LLaDA2.

    .venv/bin/python scripts/loaded_lines.py            # lines by room and by distribution
    .venv/bin/python scripts/loaded_lines.py --files    # and every file
    .venv/bin/python scripts/loaded_lines.py --check    # status 1 above the limits

The front end, the engine and its worker share this process, so that all of them are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

CHECKPOINT = ROOT / "examples/tiny/checkpoints/tiny-llada2"
PLUGIN = "vllm_dllm"
# Distributions of this repository whose modules count.
PACKAGES = (PLUGIN, "vllm_cpu_v2", "canvas_grammar")
MOST_LINES, MOST_FILES = 9_000, 80


def answer() -> None:
    """Answer one greedy chat request."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(CHECKPOINT),
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=512,
        max_num_seqs=4,
    )
    llm.chat(
        [{"role": "user", "content": "Who are you?"}],
        SamplingParams(temperature=0, max_tokens=32),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()


def loaded() -> dict[str, int]:
    """Lines of each loaded module of this repository, by its dotted name."""
    return {
        name: len(Path(module.__file__).read_text().splitlines())
        for name, module in sys.modules.items()
        if name.split(".")[0] in PACKAGES and getattr(module, "__file__", None)
    }


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="print every file")
    parser.add_argument("--check", action="store_true", help="status 1 above the limits")
    args = parser.parse_args()
    answer()
    found = loaded()
    rooms: dict[str, list[str]] = defaultdict(list)
    packages: dict[str, list[str]] = defaultdict(list)
    for name in sorted(found):
        package, *inner = name.split(".")
        rooms[f"{package}.{inner[0]}" if package == PLUGIN and inner else package].append(name)
        packages[package].append(name)

    def sized(names: list[str]) -> str:
        return f"{sum(found[name] for name in names):6} lines in {len(names):3} files"

    for room, names in sorted(rooms.items(), key=lambda item: -sum(map(found.get, item[1]))):
        print(f"{sized(names)}  {room}")
        for name in names if args.files else ():
            print(f"{found[name]:10}  {name}")
    print()
    for package, names in packages.items():
        print(f"{sized(names)}  {package}")
    lines, files = sum(found.values()), len(found)
    print(f"{sized(list(found))}  in all (at most {MOST_LINES} in {MOST_FILES})")
    return int(args.check and (lines > MOST_LINES or files > MOST_FILES))


if __name__ == "__main__":
    sys.exit(main())
