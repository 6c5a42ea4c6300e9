"""The report of ``vllm-dllm tune``: a table, a plot, and the winner as a configuration file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dllm.commands.sweep import Setting, against, hopeless, pareto_front, score_interval
from vllm_dllm.settings.server import NAMES, SETTINGS_KEY

COLUMNS = ("problems", "score, %", "95 %", "to careful", "95 %", "tokens/pass", "tokens/s")
# Colours that can be told apart without telling red from green, and in greyscale.
FRONT, OTHER, UNFINISHED = "#1f6fb4", "#8a8a8a", "#c9c9c9"


def print_table(settings: Sequence[Setting], best: Setting, tolerance: float) -> None:
    """Print a line for each setting, the most tokens per pass first."""
    from rich.console import Console
    from rich.table import Table

    table, careful = Table("setting", box=None, pad_edge=False), settings[0]
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for each in sorted(settings, key=lambda each: -each.tokens_per_pass()):
        if each.refusal:
            table.add_row(each.name, *[""] * len(COLUMNS), f"refused: {each.refusal}")
            continue
        low, high = (100 * bound for bound in score_interval(each))
        mean, least, most = (100 * bound for bound in against(each, careful))
        note = "" if len(each.parts) == len(careful.parts) else "slower"
        if hopeless(each, careful, tolerance):
            note = "worse"
        notes = {id(careful): "careful", id(best): "winner"}
        table.add_row(
            each.name,
            *(str(len(each.scores)), f"{100 * each.score:.1f}", f"{low:.1f} to {high:.1f}"),
            *(f"{mean:+.1f}", f"{least:+.1f} to {most:+.1f}"),
            *(f"{each.tokens_per_pass():.2f}", f"{each.tokens_per_second():.0f}"),
            notes.get(id(each), note),
        )
    console = Console()
    # A file has no width, and its lines must not be folded.
    (console if console.is_terminal else Console(width=200)).print(table)


def draw(settings: Sequence[Setting], best: Setting, path: Path) -> None:
    """Draw scores with their intervals against tokens per pass and per second, as an SVG file.

    Settings that have not answered all problems are pale, and not on the front. The star has won.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    complete = [each for each in settings if len(each.parts) == len(settings[0].parts)]
    speeds: Mapping[str, Callable[[Setting], float]] = {
        "tokens per pass": Setting.tokens_per_pass,
        "tokens per second": Setting.tokens_per_second,
    }
    # Equal figures give equal files.
    with rc_context({"svg.hashsalt": "vllm-dllm", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (name, speed) in zip(axes, speeds.items(), strict=True):
            front = pareto_front(complete, speed)
            for each in (each for each in settings if each.parts):
                x, y = speed(each), 100 * each.score
                bars = [[abs(100 * bound - y)] for bound in score_interval(each)]
                colour = FRONT if each in front else OTHER if each in complete else UNFINISHED
                mark = "*" if each is best else "o"
                axis.errorbar(x, y, bars, fmt=mark, color=colour, elinewidth=0.6)
                if each in front:
                    axis.annotate(each.name, (x, y), fontsize=6, rotation=20)
            axis.set(xlabel=name, ylabel="score, %")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "vllm-dllm tune"})


def as_yaml(best: Setting, section: Mapping[str, Any]) -> str:
    """The winner as a file for vLLM's ``--config``.

    Args:
        best: the winner.
        section: the settings that the engine was given; those that are no algorithm's are kept.
    """
    import yaml

    kept = {name: value for name, value in section.items() if name in NAMES}
    chosen = {"algorithm": best.choice.algorithm.name, **best.choice.settings.values()}
    return yaml.safe_dump({"additional-config": {SETTINGS_KEY: kept | chosen}}, sort_keys=False)
