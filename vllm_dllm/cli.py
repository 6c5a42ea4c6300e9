"""The ``vllm-dllm`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from vllm_dllm import __version__
from vllm_dllm.compat import command as compat_report
from vllm_dllm.selftest import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-dllm", description=__doc__)
    parser.add_argument("--version", action="version", version=f"vllm-dllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this installation can serve, and why not")
    show = commands.add_parser(
        "show-config", help="print how a model would be decoded, and where each value comes from"
    )
    show.add_argument("model")
    for option, default in (("--additional-config", {}), ("--diffusion-config", None)):
        show.add_argument(
            option, type=json.loads, default=default, metavar="JSON", help="as for `vllm serve`"
        )
    selftest = commands.add_parser(
        "selftest", help="serve three tiny models in every way that this machine has, and compare"
    )
    command.add_options(selftest)
    compat_report.add_options(
        commands.add_parser(
            "compat-report", help="say what a vLLM has changed of what this package relies on"
        )
    )
    args = parser.parse_args(argv)
    if args.command == "check":
        return check()
    if args.command == "compat-report":
        return compat_report.run(args)
    if args.command == "selftest":
        return check() or command.run(args)
    options = ("additional_config", "diffusion_config")
    return show_config(args.model, {name: getattr(args, name) for name in options})


def show_config(model: str, options: dict[str, Any]) -> int:
    """Print the settings that a server would have.

    Args:
        model: name or path of a model.
        options: options of vLLM's engine, by name.

    Returns:
        The exit status: 1, with the reason on stderr, if the server would refuse them.
    """
    from vllm_dllm import plugin
    from vllm_dllm.startup import diagnosis

    plugin.install()
    try:
        lines = diagnosis.explain(model, options)
    except Exception as error:  # a wrong setting, or a model that cannot be read: both are answers
        print(f"refused: {error}", file=sys.stderr)
        return 1
    width = max(len(name) for name, _, _ in lines)
    for name, value, source in lines:
        print(f"{name:{width}}  {value:<16}  {source}")
    return 0


def check() -> int:
    """Print what is installed.

    Returns:
        The exit status: 1, with the reason on stderr, if the installation cannot serve.
    """
    problem = report()
    if problem is not None:
        print(f"cannot serve: {problem}", file=sys.stderr)
        return 1
    print("ready: vllm serve MODEL")
    return 0


def report() -> str | None:
    """Print the state of the installation line by line; returns the first problem, or None."""
    from vllm_dllm.startup import diagnosis
    from vllm_dllm.vllm_patches import versions

    print(f"vllm-dllm      {__version__}")
    version = versions.vllm_version() or "not installed"
    print(f"vllm           {version} (supported: {versions.supported_versions()})")
    problem = versions.version_problem() or diagnosis.entry_point_problem()
    if problem is not None:
        return problem
    try:
        from vllm_dllm import plugin
        from vllm_dllm.cpu import bridge
        from vllm_dllm.families import registry

        plugin.install()
        parts = bridge.bridged_parts()
        platform, problem = diagnosis.platform_summary()
        kernels = diagnosis.kernel_summary()
    except Exception as error:  # whatever stops the plugin is what this command must report
        return f"{type(error).__name__}: {error}"
    print(f"platform       {platform}")
    print(f"bridged        {', '.join(parts) or 'nothing'}")
    print(f"kernels        {kernels}")
    print(f"architectures  {', '.join(registry.served_architectures())}")
    return problem


if __name__ == "__main__":
    sys.exit(main())
