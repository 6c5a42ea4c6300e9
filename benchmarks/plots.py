"""Result files as plots: `docs/img/NAME.svg`, one function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Record, RefusedError

# Colours that can be told apart without telling red from green, and in greyscale.
BLUE, ORANGE, GREY = "#1f6fb4", "#e07b1a", "#8a8a8a"
LIGHT, DARK, SAND = "#9cc7e8", "#15354f", "#f3c794"
# Equal figures give equal files: no date, stable ids, and text as text.
STYLE = {
    "svg.hashsalt": "vllm-dllm",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
METADATA = {"Date": None, "Creator": "benchmarks/plots.py"}
INCHES = (5.2, 3.2)


@dataclass(frozen=True)
class Plot:
    """A plot: the kind of benchmark, the stems of its files, and the drawing function."""

    kind: str
    files: tuple[str, ...]
    draw: Callable[..., None]
    panels: int = 1


def draw_all(records: Mapping[str, Record], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the plots whose files exist; returns them, and why others are refused."""
    drawn, refused = [], []
    for name, plot in PLOTS.items():
        if not all(stem in records for stem in plot.files):
            continue
        try:
            drawn.append(draw(name, [records[stem] for stem in plot.files], folder))
        except RefusedError as error:
            refused.append(str(error))
    return drawn, refused


def draw(name: str, records: list[Record], folder: Path) -> Path:
    """Draw one plot.

    Raises:
        RefusedError: no matplotlib, a file of another benchmark, or results laid out otherwise.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError(
            f"plot {name}: matplotlib is not installed; pip install 'vllm-dllm[dev]'"
        ) from error

    plot, names = PLOTS[name], ", ".join(record.name for record in records)
    if any(record.kind != plot.kind for record in records):
        raise RefusedError(f"plot {name}: {names}: not all of {plot.kind}")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES[0] * (1 + 0.4 * (plot.panels - 1)), INCHES[1]))
        axes = figure.subplots(1, plot.panels, squeeze=False)[0]
        try:
            plot.draw(*axes, *(record.results for record in records))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                f"plot {name}: {names}: not the layout of today's {plot.kind} "
                f"({type(error).__name__}: {error}); run the benchmark again"
            ) from error
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, format="svg", metadata=METADATA)
    return path


def bars(
    axis: Any, groups: list[str], series: Mapping[str, list[float]], colours: list[str]
) -> None:
    """Draw bars side by side, a group for each load, with their values on top."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [n + (number - (len(series) - 1) / 2) * width for n in range(len(groups))]
        drawn = axis.bar(places, values, 0.92 * width, label=name, color=colours[number])
        axis.bar_label(drawn, [f"{value:.0f}" for value in values], fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)


def step_time(axis: Any, results: Mapping[str, Any]) -> None:
    parts = ("forward", "head", "decoding", "schedule", "prepare", "rest")
    colours = (BLUE, LIGHT, ORANGE, DARK, SAND, GREY)
    left = [0.0] * len(results)
    for part, colour in zip(parts, colours, strict=True):
        values = [times[part] for times in results.values()]
        axis.barh(list(results), values, 0.6, left=left, label=part, color=colour)
        left = [position + width for position, width in zip(left, values, strict=True)]
    axis.grid(False)
    axis.xaxis.grid(True)
    axis.set(xlabel="ms of a denoise step (medians)", ylabel="requests")
    axis.legend(
        ncols=6, loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=7, columnspacing=1
    )


def accuracy(axis: Any, results: Mapping[str, Any]) -> None:
    labels = []
    for place, (setting, result) in enumerate(results.items()):
        match = result["exact_match"]["all"]
        rate = 100 * match["right"] / match["of"]
        low, high = (100 * bound for bound in match["interval"])
        axis.errorbar(place, rate, [[rate - low], [high - rate]], fmt="o", color=BLUE, capsize=3)
        labels.append(f"{setting.rpartition('=')[2]}\n{result['steps_per_block']:.2f}")
    axis.set_xticks(range(len(labels)), labels)
    axis.set(xlabel="threshold, and steps per block", ylabel="exact match, % (95 % interval)")


def gemma(left: Any, right: Any, tiny: Mapping[str, Any], wide: Mapping[str, Any]) -> None:
    names = {"vllm-dllm": "vllm-dllm", "native": "vLLM's class", "transformers": "transformers"}
    for axis, side, title in ((left, tiny, "272 ids"), (right, wide, "32,768 ids")):
        loads = list(side["vllm-dllm"])
        series = {
            name: [side[kind][load]["tokens_per_s"] for load in loads]
            for kind, name in names.items()
        }
        bars(axis, [load.removesuffix(" equal") for load in loads], series, [BLUE, ORANGE, GREY])
        axis.set(title=title, xlabel="requests")
    left.set_ylabel("tokens/s")
    left.legend()


def fdfo(axis: Any, results: Mapping[str, Any]) -> None:
    series = {
        mode: [modes[mode]["tokens_per_second"] for modes in results.values()]
        for mode in ("sync", "fdfo")
    }
    bars(axis, list(results), series, [GREY, BLUE])
    axis.set(xlabel="requests at a time", ylabel="tokens/s")
    axis.legend()


def serve(axis: Any, results: Mapping[str, Any]) -> None:
    styles = [(BLUE, "o-"), (GREY, "s--"), (ORANGE, "o-"), (DARK, "s--"), (DARK, "^:")]
    used = styles[: len(results)]
    for (system, by_concurrency), (colour, style) in zip(results.items(), used, strict=True):
        speeds = [figures["output_throughput"] for figures in by_concurrency.values()]
        axis.plot([int(n) for n in by_concurrency], speeds, style, label=system, color=colour)
    axis.set_xscale("log", base=2)
    loads = [int(n) for n in next(iter(results.values()))]
    axis.set_xticks(loads, [str(load) for load in loads])
    axis.set(xlabel="requests at a time", ylabel="tokens/s")
    axis.legend()


def prefill(axis: Any, results: Mapping[str, Any]) -> None:
    styles = zip((BLUE, GREY, ORANGE), ("o-", "s--", "^:"), strict=True)
    for (way, by_length), (colour, style) in zip(results["ways"].items(), styles, strict=True):
        fitted = results["fits"][way]
        power = f" (tokens^{fitted['exponent']:.2f})" if fitted else ""
        times = [figures["min_ms"] for figures in by_length.values()]
        axis.plot([int(n) for n in by_length], times, style, label=way + power, color=colour)
    axis.set(xscale="log", yscale="log", xlabel="tokens to prefill", ylabel="ms (minimum)")
    lengths = [int(n) for n in results["gain"]]
    axis.set_xticks(lengths, [str(length) for length in lengths])
    ticks = [10, 20, 50, 100, 200, 500, 1000]
    low, high = axis.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_yticks(shown, [str(tick) for tick in shown])
    axis.minorticks_off()
    axis.legend()


PLOTS: dict[str, Plot] = {
    "step_time": Plot("step_time", ("step_time",), step_time),
    "accuracy": Plot("accuracy", ("accuracy_llada2",), accuracy),
    "gemma": Plot("gemma", ("gemma", "gemma_32k"), gemma, panels=2),
    "fdfo": Plot("fdfo", ("fdfo",), fdfo),
    "serve": Plot("serve", ("serve",), serve),
    "prefill": Plot("prefill", ("prefill",), prefill),
}
