"""Result files become tables of documents, and plots; prefill refuses wrong answers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks import llada2, plain_llada2, prefill, real_size, report
from benchmarks.floor import Attention, Geometry, floor
from benchmarks.plots import PLOTS, draw_all
from benchmarks.records import KINDS, Record, RefusedError
from benchmarks.tables import TABLES, section
from examples.tiny.llada2 import load
from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer
from examples.tiny.training import Encoder
from vllm_dllm.families.diffusion_gemma.model import tensor_shapes as gemma_shapes
from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig
from vllm_dllm.families.llada2.model import tensor_shapes as llada2_shapes

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "sync": {"tokens_per_second": 100.0, "request_steps": 50, "p50_s": 0.2, "p99_s": 0.4},
    "fdfo": {"tokens_per_second": 150.0, "request_steps": 30, "p50_s": 0.1, "p99_s": 0.3},
}
RECORD = {
    "benchmark": "fdfo",
    "command": "benchmarks/fdfo.py --json out.json",
    "commit": "0123456789abcdef",
    "modified": False,
    "versions": {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"},
    "machine": {"cpu": "A Processor", "cores": 2},
    "results": {"4": MODES},
}
ROW = "| 4 | 100 | 150 | 1.50x | 20 of 50 | 0.200 / 0.100 s | 0.400 / 0.300 s |"
README = "Text.\n\n<!-- benchmark: fdfo -->\nold\n<!-- /benchmark -->\n\nMore text.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "fdfo.json").write_text(json.dumps(RECORD))
    return folder


@pytest.fixture
def run(results: Path, tmp_path: Path) -> Callable[..., int]:
    """`report.py` on this test's own files."""
    (tmp_path / "README.md").write_text(README)
    places = (
        "--results",
        results,
        "--documents",
        tmp_path / "README.md",
        "--images",
        tmp_path / "i",
    )
    return lambda *more: report.main([*map(str, places), *more])


def test_a_table_from_a_file(results: Path) -> None:
    text = section("fdfo", {"fdfo": Record.read(results / "fdfo.json")})
    header, rule, row, _, source = text.split("\n")
    assert row == ROW
    assert header.count("|") == rule.count("|") == row.count("|")
    assert source == (
        "(`benchmarks/results/fdfo.json`: commit 0123456; A Processor, 2 cores; "
        "vLLM 0.32.0+cpu, torch 2.13.0+cpu)"
    )


def test_the_load_is_told_where_it_was_kept(results: Path) -> None:
    machine = RECORD["machine"] | {"load_average": [3.14, 2, 1]}
    (results / "fdfo.json").write_text(json.dumps(RECORD | {"machine": machine, "modified": True}))
    source = Record.read(results / "fdfo.json").source()
    assert "2 cores, load average 3.1;" in source
    assert "0123456 with uncommitted changes;" in source


def test_the_readme_is_refreshed_and_then_passes_the_check(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--check") == 1
    assert "the table fdfo is not what the results say" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README, "--check writes nothing"
    assert not (tmp_path / "i").exists()
    assert run() == 0
    text = (tmp_path / "README.md").read_text()
    assert ROW in text
    assert text.startswith("Text.\n\n<!-- benchmark: fdfo -->\n| requests")
    assert text.endswith(")\n<!-- /benchmark -->\n\nMore text.\n")
    assert run("--check") == 0
    assert run() == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "i" / "fdfo.svg").read_text().startswith("<?xml")


def test_a_figure_changed_by_hand_is_found(run: Callable[..., int], tmp_path: Path) -> None:
    run()
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("1.50x", "1.60x"))
    assert run("--check") == 1


def test_a_document_of_this_repository_in_a_copy() -> None:
    """With each of its result files' tables put in: what is written is what the check accepts."""
    records, _ = report.read_all(ROOT / "benchmarks" / "results")
    sections, refused = report.all_sections(records)
    assert not refused
    copy = (ROOT / "docs" / "performance.md").read_text()
    for name in sections:
        if f"<!-- benchmark: {name} -->" not in copy:
            copy += f"\n<!-- benchmark: {name} -->\n<!-- /benchmark -->\n"
    fresh = report.refreshed(copy, sections)
    assert report.stale(copy, sections) or copy == fresh
    assert not report.stale(fresh, sections)
    assert all(body in fresh for body in sections.values())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "other.json: not JSON"),
        ("[]", "other.json: not a JSON object"),
        (json.dumps({"benchmark": "fdfo", "results": {}}), "other.json: has no command, commit"),
        (json.dumps(RECORD | {"benchmark": "poetry"}), "other.json: unknown benchmark 'poetry'"),
        (json.dumps(RECORD | {"benchmark": "serving"}), "run benchmarks/serve.py in its place"),
    ],
)
def test_files_that_are_refused(
    run: Callable[..., int],
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    complaint: str,
) -> None:
    (results / "other.json").write_text(content)
    assert run() == 1
    assert complaint in capsys.readouterr().err
    assert ROW in (tmp_path / "README.md").read_text(), "the rest went on"


def test_another_layout_is_refused_with_the_files_name(results: Path) -> None:
    old = RECORD | {"results": {"4": {"sync": MODES["sync"]}}}
    (results / "fdfo.json").write_text(json.dumps(old))
    records, _ = report.read_all(results)
    sections, (refused,) = report.all_sections(records)
    assert not sections
    assert refused.startswith("fdfo.json: not the layout of today's fdfo (KeyError: 'fdfo')")


def test_a_file_of_another_benchmark_is_refused(results: Path) -> None:
    (results / "gemma.json").write_text(json.dumps(RECORD))
    (results / "gemma_32k.json").write_text(json.dumps(RECORD))
    records, _ = report.read_all(results)
    with pytest.raises(RefusedError, match=r"gemma\.json: is of fdfo, table gemma of gemma"):
        section("gemma", records)
    del records["gemma_32k"]
    with pytest.raises(RefusedError, match=r"gemma_32k\.json is absent or refused"):
        section("gemma", records)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- benchmark: poetry -->\n<!-- /benchmark -->\n", "poetry --> has no results"),
        ("<!-- benchmark: fdfo -->\ntext\n", "fdfo --> has no <!-- /benchmark -->"),
        (
            "<!-- benchmark: fdfo -->\n<!-- benchmark: fdfo -->\n<!-- /benchmark -->\n",
            "fdfo --> has no <!-- /benchmark -->",
        ),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_markers_that_are_refused(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    complaint: str,
    check: bool,
) -> None:
    (tmp_path / "README.md").write_text(text)
    assert run(*["--check"] * check) == 1
    assert complaint in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text


def test_every_table_and_plot_is_of_a_known_benchmark() -> None:
    assert {table.kind for table in TABLES.values()} == set(KINDS)
    assert {plot.kind for plot in PLOTS.values()} <= set(KINDS)


def test_plots_of_this_repositorys_results_are_the_same_each_time(tmp_path: Path) -> None:
    records, _ = report.read_all(ROOT / "benchmarks" / "results")
    drawn, refused = draw_all(records, tmp_path / "one")
    assert drawn and not refused
    draw_all(records, tmp_path / "other")
    for path in drawn:
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name


def answer(tokens: tuple[int, ...] = (5, 6), logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Any:
    return prefill.Answer(tokens, logprobs)


@pytest.mark.parametrize(
    "other",
    [answer(tokens=(5, 7)), answer(logprobs=(-1.0, -2.1)), answer(logprobs=(-1.0, float("nan")))],
)
def test_prefill_refuses_answers_that_differ(other: prefill.Answer) -> None:
    with pytest.raises(prefill.WrongAnswerError, match="512 tokens"):
        prefill.check_same("512 tokens", answer(), other)
    prefill.check_same("512 tokens", answer(), answer(logprobs=(-1.0, -2.00001)))


def test_three_cuts_of_a_prompt() -> None:
    cuts = prefill.cuts(128, middle=256, block=32)
    assert cuts[prefill.WHOLE].chunks == (128,)
    assert cuts[prefill.BLOCKS].chunks == (32,) * 4
    assert cuts[prefill.BLOCKS].prompt == cuts[prefill.WHOLE].prompt
    fixed = cuts[prefill.FIXED]
    assert (fixed.before, fixed.chunks, len(fixed.prompt)) == (192, (128,), 320)


def test_prefill_fits() -> None:
    straight = prefill.fit({"100": 12.0, "200": 22.0, "400": 42.0})
    assert straight["line"] == pytest.approx([2.0, 100.0])
    assert 0.9 < straight["exponent"] < 1
    assert prefill.fit({"10": 1.0, "100": 100.0})["exponent"] == pytest.approx(2)
    assert prefill.fit({"10": 1.0}) is None


def test_prefill_gains_are_of_the_minima_and_of_the_rounds() -> None:
    times = {prefill.WHOLE: [1.0, 2.0], prefill.BLOCKS: [4.0, 4.0], prefill.FIXED: [1.0, 1.0]}
    found = prefill.figures({name: {"64": samples} for name, samples in times.items()})
    assert found["gain"] == {"64": 4.0}
    assert found["gain_median"] == {"64": 3.0}
    assert found["ways"][prefill.WHOLE]["64"]["samples_ms"] == [1.0, 2.0]


@pytest.mark.e2e
@pytest.mark.slow
def test_prefill_in_short(tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "prefill.py"), "--lengths", "64", "128"),
            *("--repeats", "2", "--json", str(path)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = Record.read(path)
    assert record.fields["machine"]["load_average"]
    assert "| 128 |" in section("prefill", {"prefill": record})
    assert set(record.results["gain"]) == {"64", "128"}


def test_the_loop_s_cache_changes_no_answer() -> None:
    """Rows of a batch at different positions, of which some end before the others."""
    checkpoint = ROOT / "examples" / "tiny" / "checkpoints" / "tiny-llada2"
    config = json.loads((checkpoint / "config.json").read_text())
    ends = frozenset({config["eos_token_id"]})
    encoder = Encoder(llada2_tokenizer())
    prompts = [encoder(problem).prompt for problem in held_out_set(1)]
    prompts[0] = prompts[0] * 3
    for end, tokens in ((ends, 64), (frozenset(), 40)):
        rules = plain_llada2.Rules(config["mask_token_id"], end, 0.9, tokens)
        alone = plain_llada2.Recomputing(load(checkpoint))
        together = plain_llada2.Cached(load(checkpoint))
        wanted = [plain_llada2.generate(alone, [prompt], rules)[0] for prompt in prompts]
        assert plain_llada2.generate(together, prompts, rules) == wanted
        assert plain_llada2.generate(alone, prompts, rules) == wanted
        assert any(len(answer) < tokens for answer in wanted) == bool(end)


def test_figures_of_wrong_answers_are_refused() -> None:
    def found(answers: list[list[int]]) -> dict[str, Any]:
        return {"answers": answers, "seconds": {"1": [2.0, 1.0]}}

    right = dict.fromkeys(llada2.KINDS, found([[1, 2], [3]]))
    assert llada2.figures(right)["1"]["cached"] == 3
    with pytest.raises(RuntimeError, match="recomputing: other answers"):
        llada2.figures(right | {"recomputing": found([[1, 2], [4]])})


@pytest.mark.parametrize("name", ["LLaDA2.0-mini", "DiffusionGemma"])
def test_the_floor_counts_every_weight_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """With many tokens every expert is read, and of the embedding no more than the head is."""
    system = real_size.SYSTEMS[name]
    real_size.write_checkpoint(system, tmp_path / "model", tiny=False, layers=None)
    of_config, shapes_of = {
        "LLaDA2.0-mini": (LLaDA2MoeConfig, llada2_shapes),
        "DiffusionGemma": (AutoConfig, gemma_shapes),
    }[name]
    shapes = shapes_of(of_config.from_pretrained(tmp_path / "model"))
    counted = {
        tensor: math.prod(shape)
        for tensor, shape in shapes.items()
        # Without norms and biases, and without the images' half.
        if len(shape) > 1 and "vision" not in tensor and "word_embeddings" not in tensor
    }
    if "lm_head.weight" not in counted:  # read as the head, and by self-conditioning
        counted["lm_head.weight"] = counted["model.embed_tokens.weight"]
    least = floor(system.geometry, requests=64, context=0)
    assert least.weight_bytes == pytest.approx(2 * sum(counted.values()))


def test_a_step_at_the_published_sizes_beside_vllm_s_class() -> None:
    systems = {
        "LLaDA2.0-mini": {"1": {"ms": 5.0, "floor_ms": 4.0}},
        "DiffusionGemma": {
            "1": {"ms": 10.0, "floor_ms": None},
            "64": {"ms": 80.0, "floor_ms": 40.0},
        },
        "DiffusionGemma native": {"1": {"ms": 12.0, "floor_ms": None}},
    }
    rows = list(TABLES["real_size"].rows({"tokens_per_forward": 3.0, "systems": systems}))
    assert rows[1] == ["LLaDA2.0-mini", "1", "5.00", "4.00", "1.25", "200.0", "600", "-"]
    assert rows[2] == ["DiffusionGemma", "1", "10.00", "-", "-", "100.0", "-", "1.20x"]
    assert rows[3] == ["DiffusionGemma", "64", "80.00", "40.00", "2.00", "12.5", "-", "-"]
    assert rows[4] == ["DiffusionGemma native", "1", "12.00", "-", "-", "83.3", "-", "-"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
def test_the_published_sizes_script_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "real_size.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "real_size.py"), "--tiny", "--steps", "5"]
    command += ["--requests", "1", "3", "--context", "40", "--json", str(out)]
    command += ["--systems", "LLaDA2.0-mini", "DiffusionGemma"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    systems = json.loads(out.read_text())["results"]["systems"]
    for found in systems.values():
        assert [list(found), min(one["ms"] > 0 for one in found.values())] == [["1", "3"], True]
    assert "| LLaDA2.0-mini | 3 |" in done.stdout


def test_the_floor_of_one_request_by_hand() -> None:
    """One layer, one head, two experts of which each token takes both."""
    one = Attention(layers=1, heads=1, kv_heads=1, dim=4)
    model = Geometry(2, 8, 16, (one,), {}, experts=2, chosen=2, width=3, moe_layers=1)
    weights = 4 * 8 * 4 + 8 * 2 + 8 * 16 + 2 * 3 * 8 * 3  # attention, router, head, experts
    cost = floor(model, requests=1, context=6)
    assert cost.weight_bytes == 2 * weights
    assert cost.cache_bytes == 2 * 2 * 8 * 4  # keys and values of 6 + 2 positions
    assert cost.operations == 2 * 2 * weights + 2 * 2 * 2 * 8 * 4
