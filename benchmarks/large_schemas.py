"""What the 20 largest real schemas take to compile, by this code and by an older one.

    .venv/bin/python benchmarks/large_schemas.py [--before CHECKOUT] [--json PATH]

The schemas are those beside the project whose JSON has the most characters. Each is compiled for
the tokenizer of the tiny LLaDA2 checkpoint and for a vocabulary of about 150,000 tokens, in a fork
with the memory cap that the service sets. CPU time is not capped, so that it is known; what takes
more than the service allows is marked as refused. CPU time and not wall time is measured: the least
of some repeats.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 4  # seconds of CPU time, after which a compilation is given up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of older code to compare with")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--code", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.code:
        print(json.dumps(measured(args.code, args.count, args.repeats)))
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.common import child, quiet_engines, write
    from benchmarks.constraint_tables import large_schemas
    from benchmarks.tables import markdown

    quiet_engines()
    sizes = ["--count", str(args.count), "--repeats", str(args.repeats)]
    results = {"after": child(__file__, "--code", str(ROOT), *sizes)}
    if args.before:
        before = args.before.resolve()
        results["before"] = child(__file__, "--code", str(before), *sizes, code=before)
    write(args.json, "large_schemas", results)
    print("\n".join(markdown(large_schemas(results))))


def measured(code: Path, count: int, repeats: int) -> dict[str, Any]:
    """The commit of a checkout, and what its code takes for each schema and vocabulary.

    Raises:
        RuntimeError: the code that Python finds is another's.
    """
    imported = importlib.import_module("vllm_dllm.constraints.automaton.compilation").__file__
    if not Path(imported or "").is_relative_to(code):
        raise RuntimeError(f"{code} was asked for, {imported} was imported")
    # The schemas, vocabularies and helpers are those beside this file.
    sys.path.insert(0, str(ROOT))
    from tests.support.checkpoints import TINY_LLADA2
    from tests.support.schemas.corpora import real_cases
    from tests.support.schemas.large_vocabulary import published
    from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
    from vllm_dllm.constraints.grammar.regex import load_unicode_tables

    load_unicode_tables()
    tiny = TINY_LLADA2 / "tokenizer.json"
    vocabularies = {
        "272 tokens": Vocabulary.read(tiny.read_text(encoding="utf-8"), 272, [257]),
        "150,000 tokens": published(),
    }
    largest = sorted(real_cases(), key=lambda case: -len(json.dumps(case.schema)))[:count]
    schemas: dict[str, Any] = {}
    for case in largest:
        found: dict[str, Any] = {"characters": len(json.dumps(case.schema))}
        for name, vocabulary in vocabularies.items():
            runs = [in_fork(case.schema, vocabulary) for _ in range(repeats)]
            found[name] = min(runs, key=lambda run: run["seconds"])
        schemas[case.name.split("/")[-1].removesuffix(".json")] = found
    command = ["git", "-C", str(code), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"commit": commit, "schemas": schemas}


def in_fork(schema: Any, vocabulary: Any) -> dict[str, Any]:
    """CPU seconds, memory beside that of the idle process, and sizes; or why it is refused."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        status = 1
        try:
            os.write(writer, json.dumps(compiled(schema, vocabulary)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, _, usage = os.wait4(process, 0)
    if answer:
        return dict(json.loads(answer))
    # A library written in C aborts where Python would raise `MemoryError`.
    spent = usage.ru_utime + usage.ru_stime
    return {"seconds": spent, "mib": 0, "refused": "it takes too much time or memory"}


def compiled(schema: Any, vocabulary: Any) -> dict[str, Any]:
    """Compile a schema in this process, which ends afterwards."""
    from vllm_dllm.constraints.automaton.compilation import Constraint, compile_constraint
    from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

    limits = CompileLimits()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    idle = int(pages[1]) * resource.getpagesize()
    most = int(pages[0]) * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
    found: dict[str, Any] = {}
    begin = time.process_time()
    try:
        constraint = Constraint.of("json_schema", schema)
        result: Any = compile_constraint(constraint, vocabulary, limits)
        seconds = time.process_time() - begin
        # Older code makes one automaton of a constraint, without rules that are called.
        tables = result.configurations().tables if hasattr(result, "configurations") else result
        found |= {"states": int(tables.states), "kinds": int(tables.classes)}
        if seconds > limits.cpu_seconds:
            found["refused"] = "it takes longer than the cap on CPU time"
    except ConstraintError as error:
        seconds = time.process_time() - begin
        found["refused"] = str(error)
    except MemoryError:
        seconds = time.process_time() - begin
        found["refused"] = "it takes too much memory"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found | {"seconds": round(seconds, 3), "mib": max(peak - idle, 0) >> 20}


if __name__ == "__main__":
    main()
