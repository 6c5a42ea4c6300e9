"""The ``vllm-dllm`` command."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from vllm_dllm import __version__
from vllm_dllm.commands import check, demo, show_config, tune
from vllm_dllm.commands.local_server import ServerError
from vllm_dllm.viewer import watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-dllm", description=__doc__)
    parser.add_argument("--version", action="version", version=f"vllm-dllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this installation can serve, and why not")
    demo.add_options(
        commands.add_parser("demo", help="serve a tiny model, ask it four questions, and stop")
    )
    commands.add_parser(
        "show-config",
        help="print how a model would be decoded, and where each value comes from",
        usage="vllm-dllm show-config MODEL [all flags of vllm serve]",
    )
    commands.add_parser(
        "tune",
        help="find the setting that answers your own prompts in the fewest passes",
        usage="vllm-dllm tune MODEL --data FILE.jsonl [all flags of vLLM's engine]",
    )
    watch.add_options(
        commands.add_parser("watch", help="show in the terminal how an answer is denoised")
    )
    selftest = commands.add_parser(
        "selftest", help="serve three tiny models in every way that this machine has, and compare"
    )
    first, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if first in ("show-config", "tune"):  # vLLM's own parsers read their options
        return (show_config if first == "show-config" else tune).run(rest)
    if first == "selftest":
        # Imported only here, so that the other commands do not wait for torch.
        from vllm_dllm.selftest import command

        command.add_options(selftest)
    args = parser.parse_args(argv)
    if args.command == "check":
        return check.run()
    if args.command in ("demo", "watch"):
        try:
            (demo if args.command == "demo" else watch).run(args)
            return 0
        except KeyboardInterrupt:
            return 130
        except (ServerError, OSError) as error:
            print(f"vllm-dllm {args.command}: {str(error).strip()}", file=sys.stderr)
            return 1
    # Run in a separate process, because it changes the environment that servers would inherit.
    checked = subprocess.run([sys.executable, "-m", "vllm_dllm.cli", "check"], check=False)
    return checked.returncode or command.run(args)


if __name__ == "__main__":
    sys.exit(main())
