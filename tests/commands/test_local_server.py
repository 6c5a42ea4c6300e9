"""What ``vllm-dllm demo`` and ``watch`` show while their server starts."""

from __future__ import annotations

from pathlib import Path

from vllm_dllm.commands.local_server import last_message

LOG = """\
(APIServer pid=7) INFO 11-28 01:05:36 [api_utils.py:345] version 0.32.0
(EngineCore pid=9) INFO 11-28 01:05:40 [core.py:100] Loading weights [1 of 2]
/some/place/kernels.py:81: UserWarning: a kernel is missing [kernel]
  wrapper = lookup(vars(value).get("kernel"))
Loading safetensors checkpoint shards: 100% Completed | 1/1
INFO:     127.0.0.1:52338 - "GET /health HTTP/1.1" 200 OK
"""


def test_progress_is_what_vllm_says(tmp_path: Path) -> None:
    """Catches the source line of a warning, which was shown as what the server was doing."""
    log = tmp_path / "log"
    log.write_text("")
    assert last_message(log) == ""
    log.write_text(LOG)
    assert last_message(log) == "Loading weights [1 of 2]"
    log.write_text(LOG + "(EngineCore pid=9) WARNING 11-28 01:05:41 [a.py:1] " + "long " * 30)
    assert last_message(log).startswith("long") and len(last_message(log)) <= 60
