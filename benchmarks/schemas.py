"""Which schemas of a collection are accepted, and whether what is offered validates.

    python benchmarks/schemas.py SCHEMAS.jsonl.gz [--samples 20] [--tests] [--out FILE]

A line of the collection is a JSON object with `group`, `id`, `schema` and `tests` (instances, each
with `valid` and `data`). Schemas are read as text, as a request holds them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from benchmarks.schema_order import in_order
from tests.support.derivations import derives
from tests.support.sampling import Sampler
from vllm_dllm.constraints.grammar.json.reader import read_schema
from vllm_dllm.constraints.grammar.json.shapes import SUPPORTED
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

LIMITS = CompileLimits()
MOST_SECONDS = 2.0  # to draw the texts of a schema, or to read one


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument("--samples", type=int, default=0, help="texts to draw of each schema")
    parser.add_argument("--tests", action="store_true", help="read the valid instances")
    parser.add_argument("--only", default="", help="an expression for the ids")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each schema")
    arguments = parser.parse_args()
    with gzip.open(arguments.collection, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    results = []
    for row in rows:
        if re.search(arguments.only, row["id"]):
            results.append(measured(row, arguments.samples, arguments.tests))
            if arguments.out:
                with arguments.out.open("a") as out:
                    out.write(json.dumps(results[-1]) + "\n")
    report(results)


def measured(row: dict[str, Any], samples: int, tests: bool) -> dict[str, Any]:
    """What became of one schema."""
    schema = row["schema"]
    result: dict[str, Any] = {"group": row["group"], "id": row["id"]}
    result["characters"] = len(json.dumps(schema))
    begin = time.process_time()
    try:
        language = read_schema(schema, LIMITS)
    except ConstraintError as error:
        return result | {"refused": str(error), "seconds": time.process_time() - begin}
    result["seconds"] = time.process_time() - begin
    result["left_out"] = language.left_out
    if samples:
        result |= sampled(schema, Sampler(language.node, Random(row["id"])), samples)
    if tests:
        instances = [test["data"] for test in row["tests"] if test["valid"]]
        missed = []
        for data in instances:
            text = json.dumps(in_order(schema, data), ensure_ascii=False)
            if in_time(partial(derives, language.node, text)) is False:
                missed.append(text)
        result |= {"instances": len(instances), "missed": missed}
    return result


def sampled(schema: Any, sampler: Sampler, samples: int) -> dict[str, Any]:
    """Texts that do not validate, and how many were drawn."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    wrong, drawn, begin = [], 0, time.monotonic()
    for _ in range(samples):
        text = in_time(sampler.text)
        if time.monotonic() > begin + MOST_SECONDS:
            break
        if text is None:
            continue
        drawn += 1
        error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(text)))
        if error is not None:
            wrong.append([text[:2000], f"{error.json_path}: {error.message[:200]}"])
    return {"drawn": drawn, "wrong": wrong}


def in_time(draw: Callable[[], Any]) -> Any:
    """What a function returns, or None if it takes longer than `MOST_SECONDS`."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        return draw()
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def reason(message: str) -> str:
    """The keyword that a refusal is about, and the beginning of what it says."""
    said = message.split(": ", 1)[-1]
    keyword = next((word for word in said.replace(",", " ").split() if word in SUPPORTED), "")
    return keyword or said[:60]


def report(results: list[dict[str, Any]]) -> None:
    """Print tables of what was measured."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["group"]].append(result)
        groups["all"].append(result)
    print(
        f"{'group':18}{'accepted':>12}{'share':>8}{'drawn':>8}{'wrong':>7}{'valid':>7}{'missed':>8}"
    )
    for group, some in sorted(groups.items()):
        taken = [result for result in some if "refused" not in result]
        counts = [sum(result.get("drawn", 0) for result in taken)]
        counts += [sum(len(result.get("wrong", [])) for result in taken)]
        counts += [sum(result.get("instances", 0) for result in taken)]
        counts += [sum(len(result.get("missed", [])) for result in taken)]
        share = f"{100 * len(taken) / len(some):.1f}%"
        written = f"{len(taken)}/{len(some)}"
        print(f"{group:18}{written:>12}{share:>8}", end="")
        print("".join(f"{n:>8}" for n in counts))
    reasons = Counter(reason(result["refused"]) for result in results if "refused" in result)
    print("\nrefused:")
    for text, count in reasons.most_common(40):
        print(f"{count:6} {text}")
    print("\nseconds of CPU time, the largest schemas:")
    for result in sorted(results, key=lambda result: -result["characters"])[:20]:
        print(f"{result['seconds']:8.3f} {result['characters']:7} {result['id']}"
              f"{' (refused)' if 'refused' in result else ''}")  # fmt: skip
    print("\nseconds of CPU time, the slowest schemas:")
    for result in sorted(results, key=lambda result: -result["seconds"])[:10]:
        print(f"{result['seconds']:8.3f} {result['characters']:7} {result['id']}")


if __name__ == "__main__":
    main()
