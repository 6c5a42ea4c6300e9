"""The process that imports vLLM for `asking`: it answers one question and ends.

    python -m vllm_dllm.commands.child QUESTION ARGUMENTS FILE

It imports vLLM as the command ``vllm`` does, before this package's plugin had a chance to help, so
that what breaks the one breaks the other.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[1] / "selftest" / "checkpoints"


def check() -> dict[str, Any]:
    """Go as far as ``vllm serve`` goes before it loads weights, for the tiny model of each kind.

    Returns:
        ``lines``: names and values for a person to read; ``problem``: why nothing can be served,
        or None.
    """
    _import_as_the_command_does()
    from vllm_dllm.cpu import bridge
    from vllm_dllm.families import registry
    from vllm_dllm.startup import diagnosis

    platform, problem = diagnosis.platform_summary()
    if problem is None:
        import vllm._custom_ops
        import vllm.entrypoints.openai.api_server  # noqa: F401

        diagnosis.explain(str(TINY / "tiny-llada2"), {"enforce_eager": True})
    lines = {
        "platform": platform,
        "bridged": ", ".join(bridge.bridged_parts()) or "nothing",
        "kernels": diagnosis.kernel_summary(),
        "architectures": ", ".join(registry.served_architectures()),
    }
    return {"lines": lines, "problem": problem}


def explain(model: str, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The settings that a server would have; see `vllm_dllm.startup.diagnosis.explain`."""
    _import_as_the_command_does()
    from vllm_dllm.startup import diagnosis

    return diagnosis.explain(model, options)


def _import_as_the_command_does() -> None:
    """Run ``vllm --version``, which imports what every command of vLLM needs; load the plugin.

    Raises:
        Exception: whatever keeps the command ``vllm`` from starting.
    """
    from vllm.entrypoints.cli.main import main as vllm_command

    sys.argv[:] = ["vllm", "--version"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        vllm_command()

    from vllm_dllm import plugin

    plugin.install()


QUESTIONS: dict[str, Callable[..., Any]] = {"check": check, "explain": explain}


def main(question: str, asked: str, place: str) -> None:
    """Write the answer, or why there is none, as JSON to a file."""
    try:
        said = {"answer": QUESTIONS[question](**json.loads(asked))}
    except Exception as error:  # whatever it is, it is the answer
        said = {"problem": _reason(error)}
    Path(place).write_text(json.dumps(said), "utf-8")


def _reason(error: Exception) -> str:
    """The failure in one line; pydantic may be what cannot be imported."""
    try:
        from vllm_dllm.startup.readable import readable
    except ImportError:
        return f"{type(error).__name__}: {error}"
    return readable(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
