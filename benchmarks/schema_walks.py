"""Is every text that a JSON schema's constraint offers valid, and which valid texts are offered?

    .venv/bin/python benchmarks/schema_walks.py --to PATH.jsonl [--workers 2] [--json PATH]

Each schema of JSON Schema's own test suite, and of the real schemas beside the project where they
are there, is compiled for the tokenizer of the tiny LLaDA2 checkpoint and for a vocabulary of about
150,000 tokens. Random walks through the automaton are then judged by two validators, and with the
first vocabulary the corpus' valid and invalid instances are read. A schema at a time has a process
of its own, and one line of PATH.jsonl when it ends; schemas that have a line are not run again.
The exit code is 1 if an invalid text was offered or accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import quiet_engines, write  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402
from tests.support.schemas.checks import check, refused_for  # noqa: E402
from tests.support.schemas.corpora import Case, real_cases, suite_cases  # noqa: E402
from tests.support.schemas.large_vocabulary import published  # noqa: E402
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary  # noqa: E402

CPU_SECONDS = 60  # of a schema with one vocabulary, walks included
MEMORY_BYTES = 6 << 30
SHOWN = 40  # violations that are printed


def vocabularies() -> dict[str, Vocabulary]:
    path = TINY_LLADA2 / "tokenizer.json"
    return {
        "tiny": Vocabulary.read(path.read_text(encoding="utf-8"), 272, [257]),
        "large": published(),
    }


def corpora(names: list[str], part: int) -> Iterator[Case]:
    """Every `part`-th schema of some corpora."""
    for case in [*suite_cases(), *real_cases()]:
        if case.name.split("/")[0] in names and zlib.crc32(case.name.encode()) % part == 0:
            yield case


def record_one(
    case: Case, size: str, vocabulary: Vocabulary, options: Mapping[str, Any], to: Path
) -> None:
    """Check a schema in a process of its own, and append a line with what was found."""
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            append(to, case, size, asdict(check(case, vocabulary, **options)))
        except BaseException as error:
            append(to, case, size, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        append(to, case, size, {"failed": f"ended by signal {os.WTERMSIG(status)}"})


def append(to: Path, case: Case, size: str, found: Mapping[str, Any]) -> None:
    line = json.dumps({"name": case.name, "draft": case.draft, "vocabulary": size, **found})
    file = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def run(
    cases: list[Case], sizes: list[str], options: Mapping[str, Any], workers: int, to: Path
) -> None:
    """Check all schemas that have no line yet, by some processes at a time."""
    done = {(line["name"], line["vocabulary"]) for line in lines(to)}
    found = vocabularies()
    todo = [(c, size) for c in cases for size in sizes if (c.name, size) not in done]
    children = []
    for number in range(workers):
        child = os.fork()
        if child == 0:
            for case, size in todo[number::workers]:
                record_one(case, size, found[size], options, to)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts for each corpus and vocabulary."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in found:
        groups[f"{line['name'].split('/')[0]}, {line['vocabulary']}"].append(line)
    return {name: counts(group) for name, group in sorted(groups.items())}


def counts(group: list[dict[str, Any]]) -> dict[str, Any]:
    compiled = [line for line in group if "failed" not in line and line["refused"] is None]
    refused = [line for line in group if line.get("refused") is not None]
    seconds = sorted(line["seconds"] for line in compiled)
    return {
        "schemas": len(group),
        "compiled": len(compiled),
        "refused": len(refused),
        "failed": Counter(line["failed"] for line in group if "failed" in line).most_common(),
        "refused_for": Counter(refused_for(line["refused"]) for line in refused).most_common(),
        "compile_seconds": {
            "median": seconds[len(seconds) // 2] if seconds else None,
            "largest": seconds[-1] if seconds else None,
            "above_1.5": sum(each > 1.5 for each in seconds),
        },
        "walks": sum(line["walks"] for line in compiled),
        "texts": sum(line["texts"] for line in compiled),
        "texts_with_a_name_twice": sum(line["repeating"] for line in compiled),
        "edges": sum(line["edges"][0] for line in compiled),
        "edges_taken": sum(line["edges"][1] for line in compiled),
        "texts_not_valid": sum(len(line["problems"]) for line in compiled),
        "schemas_with_such_texts": sum(bool(line["problems"]) for line in compiled),
        "valid_instances": sum(line["valid"][0] for line in compiled),
        "accepted": sum(line["valid"][1] for line in compiled),
        "not_accepted_at": Counter(
            place for line in compiled for place, _ in line["lost"]
        ).most_common(),
        "invalid_instances": sum(line["invalid"] for line in compiled),
        "invalid_accepted": sum(len(line["wrong"]) for line in compiled),
        "unable": Counter(name for line in compiled for name in line["unable"]).most_common(),
    }


def violations(found: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each schema of which an invalid text was offered or accepted, or that failed."""
    for line in found:
        where = f"{line['name']} ({line['vocabulary']})"
        if "failed" in line:
            yield f"{where}: {line['failed']}"
        elif line["problems"]:
            text, complaint = line["problems"][0]
            yield f"{where}: {len(line['problems'])} texts, such as {text[:200]}: {complaint}"
        elif line["wrong"]:
            text, description = line["wrong"][0]
            yield f"{where}: accepts {text[:200]} ({description})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="a line for each schema; resumed")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--corpus", nargs="+", default=["suite", "real"])
    parser.add_argument("--vocabulary", nargs="+", default=["tiny", "large"])
    parser.add_argument("--walks", type=int, default=200)
    parser.add_argument(
        "--canvases", action="store_true", help="walk through windows, and read no instances"
    )
    parser.add_argument("--part", type=int, default=1, help="only one of so many schemas")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    quiet_engines()
    args.to.parent.mkdir(parents=True, exist_ok=True)
    cases = list(corpora(args.corpus, args.part))
    options = {"walks": args.walks, "canvases": args.canvases}
    run(cases, args.vocabulary, options, args.workers, args.to)
    found = lines(args.to)
    results = summary(found)
    write(args.json, "schema_walks", results)
    print(json.dumps(results, indent=1))
    wrong = list(violations(found))
    print("\n".join(wrong[:SHOWN]))
    print(f"schemas with violations or failures: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
