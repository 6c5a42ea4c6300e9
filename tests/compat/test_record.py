"""The record of the tested vLLM is that of the installed one and of our source as it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_dllm.compat import sources
from vllm_dllm.compat.command import PACKAGE
from vllm_dllm.compat.definitions import Definitions
from vllm_dllm.compat.fingerprints import RECORD, read, relied_on, take
from vllm_dllm.compat.scan import Scan


@pytest.fixture(scope="module")
def scan() -> Scan:
    return Scan(PACKAGE)


def test_the_record_is_up_to_date(scan: Scan) -> None:
    source = sources.installed()
    vllm = Definitions(source)
    recorded = read(RECORD)
    now = (source.version, take(relied_on(scan, vllm), vllm))
    assert recorded == now, "run `.venv/bin/vllm-dllm compat-report --record` and commit the file"


def test_every_wrapper_and_every_import_is_in_the_record(scan: Scan) -> None:
    assert scan.unknown_wraps == []
    known = {path for thing in read(RECORD)[1] for path in thing.paths}
    missing = {
        path
        for path, uses in scan.uses.items()
        if path not in known and {use.how for use in uses} & {"wrapped", "imported", "subclassed"}
    }
    # Looked up with hasattr: the requests of /v1/responses know no beam search.
    assert {path.rpartition(":")[2] for path in missing} == {
        "ResponsesRequest.to_beam_search_params"
    }


@pytest.mark.slow
def test_what_is_wrapped_in_a_process_was_found_by_reading(scan: Scan) -> None:
    """All that the plugin has wrapped once a server's modules are imported."""
    code = """
import json, sys, types
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core
from vllm_dllm import plugin
plugin.install()
found = set()
for module in list(sys.modules.values()):
    if not getattr(module, "__name__", "").startswith("vllm."):
        continue
    for owner in [module, *(v for v in vars(module).values() if isinstance(v, type))]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, (property, staticmethod, classmethod)):
                value = value.fget if isinstance(value, property) else value.__func__
            if isinstance(value, types.FunctionType) and "_vllm_dllm_patched" in vars(value):
                found.add(f"{owner.__name__}.{name}")
print(json.dumps(sorted(found)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    wrapped = set(json.loads(done.stdout.splitlines()[-1]))
    places = {path: thing.fingerprint.place for thing in read(RECORD)[1] for path in thing.paths}
    found = {
        name.replace(":", ".")
        for path, uses in scan.uses.items()
        if any(use.how == "wrapped" for use in uses) and path in places
        for name in (path, places[path])
    }
    assert len(wrapped) > 8
    assert {name for name in wrapped if not any(place.endswith(name) for place in found)} == set()
