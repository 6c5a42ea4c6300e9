"""``vllm-dllm tune`` with real engines: its winner against an exhaustive sweep."""

from __future__ import annotations

import json
import os
import subprocess
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from examples.tiny.tasks import held_out_set
from tests.support.checkpoints import TINY_LLADA2
from tests.support.commands import command
from tests.support.engine import engine
from vllm_dllm import cli
from vllm_dllm.commands import tune
from vllm_dllm.commands.tune import part_ends, settings_of, winner
from vllm_dllm.settings.parsing import parse_settings
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

pytestmark = pytest.mark.engine
FLAGS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", "64M", "--max-tokens", "64"),
)
TOLERANCE = 0.01


def data(folder: Path, per_task: int) -> Path:
    path = folder / "problems.jsonl"
    lines = [json.dumps(asdict(problem)) for problem in held_out_set(per_task)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_race_and_its_second_half(tmp_path: Path) -> None:
    """A small race finds the whole sweep's winner, and goes on without measuring anything again."""
    rows = tune.read_rows(data(tmp_path, 3))
    ends, log = part_ends(len(rows)), tmp_path / "measurements.jsonl"
    names = ["LowConfidence", "Leftmost"]
    with engine(TINY_LLADA2, 32, disable_log_stats=False) as running:
        served = running.llm.model_config.dllm
        bench = tune.Bench(running.llm, Namespace(max_tokens=64, score_command=None), rows)
        raced, every = settings_of(served, names), settings_of(served, names)
        tune.take_up(log, {}, raced)
        tune.race(bench, raced, TOLERANCE, log)
        best = winner(raced, TOLERANCE)
        measured = log.read_text().splitlines(keepends=True)

        again = settings_of(served, names)
        log.write_text("".join(measured[:6]) + measured[6][:20])
        tune.take_up(log, {}, again)
        tune.race(bench, again, TOLERANCE, log)
        assert len(log.read_text().splitlines()) == len(measured)
        assert winner(again, TOLERANCE).name == best.name

        for each in every:
            for end in ends:
                each.parts.append(bench.measure(each, every[0], end))
    sweep = {each.name: each for each in every}
    for each in raced:
        parts = zip(each.parts, sweep[each.name].parts, strict=False)
        assert all((a.scores, a.passes) == (b.scores, b.passes) for a, b in parts)
    assert best.name == winner(every, TOLERANCE).name
    assert best.tokens_per_pass() > 2 * every[0].tokens_per_pass()
    assert sum(len(each.parts) for each in raced) < len(ends) * len(raced)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without answers: the table, and a file that a server takes."""
    path, folder = data(tmp_path, 1), tmp_path / "out"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    asked = ("--data", str(path), "--output", str(folder))
    arguments = ["tune", str(TINY_LLADA2), *FLAGS, *asked, "--algorithms", "EntropyBound"]
    status = cli.main(arguments)
    told = capsys.readouterr()
    assert status == 0, told.err
    assert "tokens/pass" in told.out and "winner: " in told.out
    written = yaml.safe_load((folder / "winner.yaml").read_text())["additional-config"]
    chosen = parse_settings(written, "mask", "LowConfidence")
    assert chosen.algorithm in ("EntropyBound", "LowConfidence") and chosen.parameters


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("--tolerance", "-1"), "--tolerance must be from 0 to 100"),
        (("--port", "8000"), "unrecognized arguments: --port"),
    ],
)
def test_flags_that_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        tune.parse(["MODEL", "--data", str(tmp_path / "none.jsonl"), *arguments])
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_sweep_within_five_minutes(tmp_path: Path) -> None:
    """200 problems and every algorithm, of which most is set aside."""
    path, folder = data(tmp_path, 29), tmp_path / "out"
    lines = path.read_text().splitlines(keepends=True)[:200]
    path.write_text("".join(lines))
    began = time.monotonic()
    done = subprocess.run(
        command("tune", str(TINY_LLADA2), *FLAGS, "--data", str(path), "--output", str(folder)),
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{seconds:.0f} s\n{done.stdout}")
    assert seconds < 300
    rows = tune.read_rows(path)
    every = settings_of(Served("mask", "LowConfidence", DllmSettings(), length=32))
    log = folder / "measurements.jsonl"
    tune.take_up(log, json.loads(log.open().readline()), every)
    assert sum(len(each.scores) for each in every) < 0.7 * len(rows) * len(every)
    assert winner(every, TOLERANCE).tokens_per_pass() > every[0].tokens_per_pass()
