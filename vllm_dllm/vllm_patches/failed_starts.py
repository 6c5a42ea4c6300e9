"""A start that fails says why: in one sentence, at the end.

In vLLM the reason is lost on two ways. A refused configuration becomes pydantic's text of several
lines. And an engine that fails, or one of its workers, ends its process, of which the front end
knows no more than the exit status.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_dllm.ranges import SettingsError
from vllm_dllm.vllm_patches.last_words import fail_with_last_line
from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap

# Names the file in which a process of an engine that fails to start leaves the reason.
REPORT = "VLLM_DLLM_START_REPORT"
# Each of these logs the exception that ends its process.
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")

# Whether a model of ours is being started in this process.
_ours = False


class EngineStartError(RuntimeError):
    """An engine could not start; the message is the reason that its own process gave."""


class RefusedError(ValueError):
    """A configuration that vLLM refuses for one of our models, in one sentence."""


def apply() -> None:
    """Let failed starts of our models end with the reason."""
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_engine_config", _without_pydantic)
    wrap(EngineArgs, "create_model_config", _note_our_model)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Reporter) for handler in logger.handlers):
            logger.addHandler(_Reporter(logging.ERROR))
    # In the process of `vllm serve` it has been imported, and its command not been chosen yet.
    command = sys.modules.get("vllm.entrypoints.cli.serve")
    if command is not None:
        wrap(command.ServeSubcommand, "cmd", _end_with_a_sentence)
        wrap(command, "run_headless", _hear_why_workers_fail)


def apply_to_launcher(module: ModuleType) -> None:
    """Let the processes of engines tell why they cannot start.

    Args:
        module: of vLLM, with the name ``launch_core_engines``.
    """
    wrap(module, "launch_core_engines", _hear_why_engines_fail)


def _note_our_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_model_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _ours
        model_config = original(self, *args, **kwargs)
        _ours = is_ours(model_config)
        if _ours:
            from vllm_dllm.startup.expert_parallel import refuse_balancing

            refuse_balancing(self, model_config)
        return model_config

    return create_model_config


def _without_pydantic(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _ours
        _ours = False  # until the model is known
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            from vllm_dllm.startup.readable import cause_within, readable

            cause = cause_within(error)
            if not _ours and not isinstance(cause, SettingsError):
                raise
            _ours = True
            if isinstance(cause, SettingsError):
                raise cause from None
            raise RefusedError(readable(cause)) from (error if cause is error else None)

    return create_engine_config


@contextmanager
def _report() -> Iterator[Callable[[], str | None]]:
    """A place where processes that are started meanwhile leave a reason; gives what reads it."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-dllm-"))
    file = folder / "reason"
    os.environ[REPORT] = str(file)

    def read() -> str | None:
        with contextlib.suppress(OSError):
            return file.read_text(errors="replace") or None
        return None

    try:
        yield read
    finally:
        os.environ.pop(REPORT, None)
        shutil.rmtree(folder, ignore_errors=True)


class _Reporter(logging.Handler):
    """Leaves the reason where the front end looks for it. The first process that fails does."""

    def emit(self, record: logging.LogRecord) -> None:
        path, error = os.environ.get(REPORT), record.exc_info and record.exc_info[1]
        if path is None or not isinstance(error, BaseException):
            return
        from vllm_dllm.startup.readable import readable

        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(readable(error))


def _hear_why_engines_fail(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def launch_core_engines(vllm_config: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not is_ours(vllm_config.model_config):
            with original(vllm_config, *args, **kwargs) as launch:
                yield launch
            return
        with _report() as heard:
            try:
                with original(vllm_config, *args, **kwargs) as launch:
                    yield launch
            except Exception as error:
                reason = heard()
                if reason is None:
                    raise
                raise EngineStartError(reason) from error

    return launch_core_engines


def _hear_why_workers_fail(original: Callable[..., None]) -> Callable[..., None]:
    """For a node that has workers of an engine and no server."""

    def run_headless(args: Any) -> None:
        with _report() as heard:
            try:
                original(args)
            except Exception as error:
                reason = heard()
                if reason is None or not _ours:
                    raise
                raise EngineStartError(reason) from error

    return run_headless


def _end_with_a_sentence(original: Callable[..., None]) -> Callable[..., None]:
    def cmd(args: Any) -> None:
        try:
            if args.middleware:
                from vllm_dllm.startup.live_page import refuse_several_servers

                refuse_several_servers(args)
            original(args)
        except Exception as error:
            if not _ours and not isinstance(error, SettingsError):
                raise
            from vllm_dllm.startup.readable import readable

            # The user's doing needs no traceback; that of a failed engine is above.
            if not isinstance(error, (SettingsError, RefusedError, EngineStartError)):
                traceback.print_exception(error)
            fail_with_last_line(readable(error), started=False)
            raise SystemExit(1) from None

    return cmd
