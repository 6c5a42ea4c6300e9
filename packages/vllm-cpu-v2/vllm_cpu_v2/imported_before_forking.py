"""The imports of a fork server before it forks the processes of an engine, see `fork_server`."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

_SERVER = os.getpid()


def _end_when_asked() -> None:
    if os.getppid() == _SERVER:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_quietly() -> None:
    if os.getpid() == _SERVER:
        os._exit(0)


# An interpreter that receives its code as an argument looks for modules in the current folder.
sys.path[:] = [folder for folder in sys.path if folder]
# A signal to the process group must not end the server before its children, which finish their
# requests first: their exit status would be lost, and the front end would take them for dead.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=_end_when_asked)

# Imported objects do not become garbage, and looking for garbage would take a fifth of the time.
gc.disable()

from vllm.utils.system_utils import set_process_title  # noqa: E402
from vllm.v1.engine import core  # noqa: E402, F401
from vllm.v1.executor import multiproc_executor  # noqa: E402, F401

# Plugins are left to each child, which loads them when a fresh interpreter would: after it
# configures logging, which removes the handlers that it finds.
set_process_title("ForkServer")
# The server ends last, after the front end's last line, and libraries would report their leaks.
atexit.register(_leave_quietly)
# A garbage collection in a child then neither examines nor copies these objects.
gc.freeze()
gc.enable()
