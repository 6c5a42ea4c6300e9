"""The command ``vllm-dllm selftest``: its options, and the order in which things happen."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from vllm_dllm.selftest import bench, report
from vllm_dllm.selftest.cases import FAMILIES, Case, absent, cases_of
from vllm_dllm.selftest.children import run_job
from vllm_dllm.selftest.golden import CHECKPOINTS, GOLDEN, Golden, GoldenError, judge, load
from vllm_dllm.selftest.machine import Machine, this_machine
from vllm_dllm.selftest.report import FAILED, NOT_RUN, PASSED, Result

# The most memory that a child takes on a GPU and on a host.
CHILD_MEMORY = {True: 3 << 30, False: 6 << 30}
MOST_JOBS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--list", action="store_true", help="show the cases of this machine; run nothing")
    add("--only", metavar="TEXT", help="the cases whose name has this text")
    add("--every", action="store_true", help="all combinations; takes far more than five minutes")
    add("--bench", action="store_true", help="then time steps, against this device's own floor")
    add("--json", type=Path, metavar="FILE", help="write everything here: the file to send us")
    add("--jobs", type=int, metavar="N", help="processes at a time")
    add("--case-limit", type=float, default=180.0, metavar="S", help="seconds of one case at most")
    add("--limit", type=float, default=0.0, metavar="S", help="start no case after this time")
    add(
        *("--checkpoints",),
        type=Path,
        default=CHECKPOINTS,
        metavar="DIR",
        help=f"a folder with {', '.join(FAMILIES.values())}",
    )
    add("--golden", type=Path, default=GOLDEN, metavar="DIR", help="their golden answers")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 if a case failed or did not run."""
    machine = this_machine()
    every = cases_of(machine, every=args.every)
    cases = [case for case in every if not args.only or args.only in case.name]
    lacking = absent(machine)
    print(f"{machine.device}, {machine.name}: {len(cases)} of {len(every)} cases")
    if args.list:
        print("\n".join([*(case.name for case in cases), "not here:"]))
        print("\n".join(f"  {what}: {why}" for what, why in lacking))
        return 0
    if not cases:
        print(f"no case has {args.only!r} in its name; --list shows them")
        return 1
    begin = time.monotonic()
    results = list(_results(cases, args, args.jobs or jobs(machine)))
    results.sort(key=lambda one: cases.index(one.case))
    figures = _bench(machine, args) if args.bench else {}
    print("\n".join(report.table(results, lacking)))
    if figures:
        print("\n".join(report.bench_table(figures)))
    if args.json is not None:
        seconds = time.monotonic() - begin
        report.write(args.json, report.record(machine, results, lacking, figures, seconds))
        print(f"written: {args.json}")
    fine = all(one.result == PASSED for one in results)
    return 0 if fine and not any("problem" in found for found in figures.values()) else 1


def jobs(machine: Machine) -> int:
    """How many children run at a time: each needs a core and some memory."""
    cores = machine.cores if machine.is_cpu else machine.cores // 2
    room = machine.memory // CHILD_MEMORY[machine.is_cpu]
    return max(1, min(cores, room, MOST_JOBS))


def _results(cases: Sequence[Case], args: argparse.Namespace, at_once: int) -> Iterator[Result]:
    """Run the cases, and print the result of each as it ends."""
    known: dict[str, Golden | GoldenError] = {}
    for family in {case.family for case in cases}:
        try:
            known[family] = load(args.golden, args.checkpoints, family)
        except GoldenError as error:
            known[family] = error
    end = time.monotonic() + args.limit if args.limit else float("inf")

    def one(case: Case) -> Result:
        if time.monotonic() > end:
            return Result(case, NOT_RUN, f"the time of --limit {args.limit:.0f} was over")
        return examine(case, known[case.family], lambda job: run_job(job, args.case_limit))

    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(one, case) for case in cases]
        for number, done in enumerate(as_completed(waiting), 1):
            result = done.result()
            print(f"[{number}/{len(cases)}] {result.line()}", flush=True)
            yield result


def examine(
    case: Case, golden: Golden | GoldenError, run: Callable[[dict[str, Any]], Any]
) -> Result:
    """Run a case and judge it.

    Args:
        case: the case.
        golden: its family's golden answers, or why there are none.
        run: runs a job and returns its `Outcome`.
    """
    if isinstance(golden, GoldenError):
        return Result(case, FAILED, str(golden))
    outcome = run(golden.job(case))
    if outcome.answer is None:
        return Result(case, FAILED, outcome.problem, outcome.seconds, log=outcome.log)
    verdict = judge(case, golden, outcome.answer)
    return Result(
        case,
        FAILED if verdict.faults else PASSED,
        "; ".join(verdict.faults),
        outcome.seconds,
        verdict,
        outcome.answer,
        outcome.log,
    )


def _bench(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of each system, measured one after the other, or why there are none."""
    figures = {}
    for system in bench.systems(machine):
        outcome = run_job(bench.job(system, args.checkpoints, machine), args.case_limit)
        figures[system.name] = outcome.answer or {"problem": outcome.problem}
        print(f"timed {system.name}", flush=True)
    return figures
