"""What is printed and written, from results that nobody had to compute."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_dllm.attention.route_parts import Device
from vllm_dllm.selftest.cases import Case
from vllm_dllm.selftest.golden import Verdict
from vllm_dllm.selftest.machine import Machine
from vllm_dllm.selftest.report import NOT_RUN, Result, bench_table, record, table, write

CHOSEN = {"backend": "CPU_ATTN", "graphs": "EAGER", "kernels": "torch", "scheduling": "sync"}
USED = {
    when: {"resident": size * 10**6}
    for when, size in zip(("before", "started", "after"), (1, 20, 300), strict=True)
}
ANSWER = {"chosen": CHOSEN, "seconds": {"start": 4.25}, "memory": USED, "together": "much"}
DIFFERENCE = {"id": "greedy-1", "place": "alone", "golden": [1], "tokens": [2]}
FINE = Result(
    Case("llada2", "CPU_ATTN", "EAGER", "torch", "float32", "sync"),
    "passed",
    seconds=21.0,
    verdict=Verdict([], 54, [], 182, 182, 200),
    answer=ANSWER,
)
WRONG = Result(
    Case("llada2"),
    "FAILED",
    "1 of 54 requests differ: greedy-1",
    20.0,
    Verdict(["x"], 54, [DIFFERENCE], 182, 182, 200),
    ANSWER,
)
DEAD = Result(Case("diffusion_gemma"), "FAILED", "killed by SIGSEGV", 3.0)
LATE = Result(Case("diffusion_gemma"), NOT_RUN, "the time of --limit 5 was over")


def test_a_line_for_each_case() -> None:
    assert FINE.line() == (
        "passed      21 s  llada2/CPU_ATTN/EAGER/torch/float32/sync  "
        "54 of 54 requests, 182 of 200 problems (182)"
    )
    assert WRONG.line().endswith(
        "53 of 54 requests, 182 of 200 problems (182); 1 of 54 requests differ: greedy-1"
    )
    assert DEAD.line() == "FAILED       3 s  diffusion_gemma/defaults  killed by SIGSEGV"


def test_the_table() -> None:
    lines = table([FINE, DEAD, LATE], [("CUDA graphs", "no GPU")])
    assert lines[1].split() == [
        *("result", "case", "attention", "graphs", "kernels", "scheduling", "start", "memory")
    ]
    assert lines[2].endswith("4.2 s  1 -> 20 -> 300 MB")
    assert lines[2].index("CPU_ATTN", 20) == lines[1].index("attention")
    assert "killed by SIGSEGV" in lines[3] and "--limit 5" in lines[4]
    assert "  CUDA graphs: no GPU" in lines
    assert lines[-1] == "1 passed, 1 FAILED, 1 not run"


def test_the_file(tmp_path: Path) -> None:
    machine = Machine(Device("cuda", (9, 0), True, frozenset({2, 4})), name="a GPU")
    place = tmp_path / "report.json"
    figures = {"llada2, default": {"problem": f"no such file: {Path.home()}/model"}}
    write(place, record(machine, [FINE, WRONG, DEAD], [("cache fp8", "none")], figures, 12.34))
    content = json.loads(place.read_text())
    assert content["machine"]["capability"] == [9, 0]
    assert content["machine"]["flash_attention"] == [2, 4]
    assert content["seconds"] == 12.3
    fine, wrong, dead = content["cases"]
    assert fine["memory"] == USED and fine["verdict"]["differ"] == []
    assert "together" not in fine, "answers are there where they differ"
    assert wrong["verdict"]["differ"] == [DIFFERENCE]
    assert (dead["result"], dead["reason"], dead["chosen"]) == ("FAILED", "killed by SIGSEGV", None)
    assert content["not_here"] == [{"what": "cache fp8", "why": "none"}]
    assert content["bench"]["llada2, default"] == {"problem": "no such file: ~/model"}


def test_step_times() -> None:
    timed = {"ms": 7.5, "median_ms": 7.0, "least_ms": 0.25}
    device = {"bandwidth": 33e9, "rate": 9e10}
    lines = bench_table(
        {"ours": {"device": device, "steps": {"4": timed}}, "native": {"problem": "no"}}
    )
    assert lines[2].split() == ["ours", "4", "7.50", "0.2500"]
    assert lines[3].split() == ["native", "no"]
    assert lines[4] == "this device: 33.0 GB/s copied, 0.090 TFLOP/s"
