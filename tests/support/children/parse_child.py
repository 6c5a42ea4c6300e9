"""Whether programs accept the options that the documentation gives them, in one process for all.

A script is asked for its help after the given options, so that it checks these and does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_dllm.commands import installation, show_config
from vllm_dllm.decoding import Corruption
from vllm_dllm.settings.parsing import parse_options, parse_settings
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings

# vLLM's subcommand -> the module that has it.
MODULES = {
    "serve": "vllm.entrypoints.cli.serve",
    "chat": "vllm.entrypoints.cli.openai",
    "complete": "vllm.entrypoints.cli.openai",
    "bench": "vllm.entrypoints.cli.benchmark.main",
}


def decoding(model: str) -> tuple[Corruption, str]:
    """What fills fresh canvases of a model, and its authors' algorithm."""
    if "diffusiongemma" in model:
        return "uniform", "EntropyBound"
    if "openPangu" in model:
        return "mask", "SubBlocks"
    return "mask", "LowConfidenceDynamic" if "sdar" in model else "LowConfidence"


def faults(given: list[list[str]]) -> Iterator[str | None]:
    """What is wrong with each of these commands, if anything."""
    sys.path.insert(0, "")
    yield from map(fault, given)


def fault(words: list[str]) -> str | None:
    program, *rest = words
    if program == "python":
        return script_fault(rest)
    if rest[:1] == ["show-config"]:
        return vllm_fault(["serve", *rest[1:]])
    if program == "vllm-dllm":
        return help_fault(rest, lambda: importlib.import_module("vllm_dllm.cli").main())
    if program == "vllm":
        return vllm_fault(rest)
    if program == "request":
        model, options = rest
        served = Served(*decoding(model), DllmSettings())
        return refused(lambda: parse_options(json.loads(options), served))
    raise ValueError(f"not known how to check {program}")


def script_fault(words: list[str]) -> str | None:
    """Of `python SCRIPT ...` and `python -m MODULE ...`."""
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            return f"no module {words[1]}"
        return help_fault(words[2:], lambda: runpy.run_module(words[1], run_name="__main__"))
    if not Path(words[0]).is_file():
        return f"no file {words[0]}"
    return help_fault(words[1:], lambda: runpy.run_path(words[0], run_name="__main__"))


def help_fault(options: list[str], run: Any) -> str | None:
    """What a program says to its options, and which of them its help does not name."""
    output = io.StringIO()
    sys.argv = ["program", *options, "--help"]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            run()
        return "did not stop at --help"
    except SystemExit as ended:
        if ended.code:
            return output.getvalue()[-500:]
    except Exception:
        return traceback.format_exc()[-1000:]
    known = set(re.findall(r"--[\w-]+", output.getvalue()))
    given = {word.partition("=")[0] for word in options if word.startswith("--")}
    return f"no option {', '.join(sorted(given - known))}" if given - known else None


def vllm_fault(words: list[str]) -> str | None:
    """Of `vllm SUBCOMMAND ...`; a server is configured, too, where its files are here."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The parser of `vllm bench` looks there for its name.
    sys.argv = ["vllm", *words]
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for command in importlib.import_module(MODULES[words[0]]).cmd_init():
        command.subparser_init(subparsers)
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            args = parser.parse_args(words)
    except (SystemExit, ValueError) as error:
        return output.getvalue()[-500:] or str(error)
    if words[0] == "serve" and Path(words[1]).is_dir():
        installation.load("ERROR")
        return refused(lambda: show_config.explain(words[1:]))
    given = getattr(args, "additional_config", None)
    return refused(lambda: parse_settings(given, *decoding(words[1])))


def refused(run: Any) -> str | None:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
