"""``vllm-dllm show-config``: how a server would decode a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_dllm.commands import installation
from vllm_dllm.settings.server import LENGTHS, SETTINGS_KEY

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig

    from vllm_dllm.settings.resolution import Served


def run(arguments: Sequence[str]) -> int:
    """Print the settings of ``vllm serve`` with these arguments; returns 1 if it refuses them."""
    try:
        installation.load("WARNING")
        lines = explain(arguments)
    except Exception as error:
        print(f"refused: {reason(error)}", file=sys.stderr)
        return 1
    width = max(len(name) for name, _, _ in lines)
    for name, value, source in lines:
        print(f"{name:{width}}  {value:<16}  {source}")
    return 0


def explain(arguments: Sequence[str]) -> list[tuple[str, str, str]]:
    """For each setting its name, its value and its source; plugins must be loaded already.

    Raises ValueError if the model is not ours, or a server would refuse a setting.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_dllm.vllm_seams.registration import is_ours

    parsed = parse(arguments)
    args = AsyncEngineArgs.from_cli_args(parsed)
    if args.max_num_seqs is None:
        # It does not matter here whether this machine has the memory for the default number.
        args.max_num_seqs = 1
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if not is_ours(config.model_config):
        raise ValueError(f"{parsed.model} is not a model of this package")
    section = config.additional_config.get(SETTINGS_KEY) or {}
    source = length_source(config, args.diffusion_config)
    return explained(config.model_config.dllm, source, section)


def explained(
    served: Served, length_source: str, section: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """The settings of a request without options, as (name, value, source).

    `section` has the settings that were given to the server.
    """
    from vllm_dllm.settings.resolution import DEFAULT, SERVER

    choice, settings = served.choose(), served.settings
    own = {name: f"{value:g}" for name, value in choice.settings.values().items()}
    values = {"algorithm": choice.algorithm.name, **own, "max_steps": str(choice.max_steps)}
    lines = [(name, value, choice.sources[name]) for name, value in values.items()]
    lines.append(("canvas_length", str(served.length), length_source))
    # What has been explained, and the algorithm's settings, are not repeated.
    for name in vars(settings):
        if name in ("algorithm", "parameters", "max_steps"):
            continue
        value = getattr(settings, name)
        shown = DEFAULT if value is None else str(value)
        lines.append((name, shown, DEFAULT if section.get(name) is None else SERVER))
    return lines


def length_source(vllm_config: VllmConfig, diffusion: Mapping[str, Any] | None) -> str:
    """The source of the canvas length; ``diffusion`` is the value of ``--diffusion-config``."""
    from vllm_dllm.families.config_fields import hf_overrides, stated_fields
    from vllm_dllm.settings.resolution import CHECKPOINT, DEFAULT, HF_OVERRIDES, SERVER

    if (diffusion or {}).get("canvas_length"):
        return SERVER
    model = vllm_config.model_config
    if hf_overrides(model).keys() & set(LENGTHS):
        return HF_OVERRIDES
    return CHECKPOINT if any(map(stated_fields(model).get, LENGTHS)) else DEFAULT


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments with vLLM's own parser for ``vllm serve``, including ``--config``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    serve = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args([serve.name, *arguments])
    serve.validate(parsed)
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    return parsed


def reason(error: BaseException) -> str:
    """Why a server would not start, in one line."""
    text = " ".join(str(error).split()).rstrip(".")
    expected = isinstance(error, (ValueError, RuntimeError, OSError)) and text
    return text if expected else f"{type(error).__name__}: {text}"
