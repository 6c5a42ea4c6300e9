"""What this package relies on in vLLM: names that it wraps, overrides, inherits from or reads.

    .venv/bin/python -m tests.vllm_seams.signatures

writes their signatures in the installed vLLM to ``signatures.json``, which `test_signatures`
compares, and the releases with which each seam was tried to ``docs/seams.md``. It imports every
module of the package and starts an engine, because some functions are wrapped only then.

The file has one signature of a name that is alike in all releases, else one for each release that
has the name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.checkpoints import TINY
from tests.vllm_seams import seams
from vllm_dllm.vllm_seams import versions

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_dllm"
RECORD = Path(__file__).with_name("signatures.json")
MISSING = "missing"
# Group -> name -> signature.
Names = dict[str, dict[str, str]]
# The releases, and the groups with signatures by release where these differ.
Record = dict[str, Any]


def relied_on() -> Names:
    """The signature of each name: ``wrapped``, ``overridden``, ``inherited`` and ``used``."""
    wrapped = _record_wraps()
    _start_an_engine()
    from vllm.v1.engine.input_processor import InputProcessor

    found: Names = {"wrapped": {}, "overridden": {}, "inherited": {}}
    found["used"] = {name: signature_of(name) for name in seams.USED}
    # Of single objects, see `vllm_seams.request_entry`.
    name = "process_inputs"
    found["overridden"][_called(InputProcessor, name)] = signature(InputProcessor, name)
    for owner, name in wrapped:
        found["wrapped"][_called(owner, name)] = signature(owner, name)
    for own, base in sorted(set(_subclasses()), key=str):
        found["inherited"][_called(base, "__init__")] = signature(base, "__init__")
        for name in vars(own).keys() & vars(base).keys():
            if callable(getattr(base, name)) and not name.startswith("__"):
                found["overridden"][_called(base, name)] = signature(base, name)
    # A class that vLLM makes in a function is not found by its name; its bases are.
    return {
        group: {name: names[name] for name in sorted(names) if signature_of(name) != MISSING}
        for group, names in found.items()
    }


def _record_wraps() -> list[tuple[Any, str]]:
    """From here on, the owner and the name of each function of vLLM that is wrapped."""
    from vllm_dllm.vllm_seams import wrapping

    original, wrapped = wrapping.wrap, []

    def wrap(owner: Any, name: str, decorator: Any) -> None:
        wrapped.append((owner, name))
        original(owner, name, decorator)

    wrapping.wrap = wrap
    return wrapped


def _start_an_engine() -> None:
    # Modules of the server, whose functions are wrapped where they have been imported.
    import vllm.entrypoints.anthropic.serving
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm import LLM, SamplingParams
    from vllm.parser import ParserManager

    llm = LLM(
        str(TINY / "tiny-sdar"),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 24,
        enable_lora=True,
    )
    traced = SamplingParams(extra_args={"diffusion_trace": True})
    llm.generate("1 + 1", traced, use_tqdm=False)
    ParserManager.get_parser(reasoning_parser_name="qwen3")


def _subclasses() -> Iterator[tuple[type, type]]:
    """The classes of this package, each with every class of vLLM that it inherits from."""
    import vllm_dllm

    for module in pkgutil.walk_packages(vllm_dllm.__path__, "vllm_dllm."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name:
                yield from ((value, base) for base in value.__mro__ if _is_of_vllm(base))


def missing_imports() -> list[str]:
    """What this package imports from vLLM, also inside functions, and vLLM does not have."""
    missing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    try:
                        module = importlib.import_module(node.module)
                        if not hasattr(module, alias.name):
                            importlib.import_module(f"{node.module}.{alias.name}")
                    except ImportError as error:
                        missing.append(f"{path.relative_to(PACKAGE)}: {error}")
    return missing


def _is_of_vllm(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "vllm"


def _called(owner: Any, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return f"{owner.__name__}:{name}"


def signature_of(called: str) -> str:
    """The signature of a name as the record has it, or `MISSING`; it needs no engine."""
    module, _, path = called.partition(":")
    *owners, name = path.split(".")
    try:
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        return signature(owner, name)
    except (ImportError, AttributeError):
        return MISSING


def signature(owner: Any, name: str) -> str:
    """The parameters without types and default values: their names, kinds and order.

    Of what is no function: ``field`` of a message, or ``attribute`` that methods set.

    Raises:
        AttributeError: there is no such name.
    """
    if isinstance(owner, type):
        if any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__):
            return "field"
        if not hasattr(owner, name) and f"self.{name}" in inspect.getsource(owner):
            return "attribute"
    attribute = getattr(owner, name)
    if not callable(attribute):
        return type(attribute).__name__
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else _Default(),
        )
        for parameter in inspect.signature(attribute).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Default:
    def __repr__(self) -> str:
        return "..."


def installed() -> str:
    """The first two numbers of the installed vLLM's version, such as ``0.32``."""
    return ".".join((versions.vllm_version() or "").split(".")[:2])


def of_release(record: Record, release: str) -> Names:
    """What the record says of one release."""
    return {
        group: {
            name: found
            for name, signatures in record[group].items()
            if (found := _in(signatures, release)) is not None
        }
        for group in record.keys() - {"releases"}
    }


def _in(signatures: str | dict[str, str], release: str) -> str | None:
    return signatures if isinstance(signatures, str) else signatures.get(release)


def recorded(record: Record, release: str, found: Names) -> Record:
    """The record with what was found in a release instead of what it said of that release."""
    by_release = {each: of_release(record, each) for each in record["releases"]} | {release: found}
    releases = sorted(by_release, key=lambda each: [int(number) for number in each.split(".")])
    merged: Record = {"releases": releases}
    for group in found:
        names = sorted({name for each in by_release.values() for name in each.get(group, {})})
        merged[group] = {
            name: _joined({each: by_release[each].get(group, {}).get(name) for each in releases})
            for name in names
        }
    return merged


def _joined(by_release: dict[str, str | None]) -> str | dict[str, str]:
    """One signature if all releases have the same."""
    if len(set(by_release.values())) == 1:
        return next(iter(by_release.values())) or MISSING
    return {release: found for release, found in by_release.items() if found is not None}


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(relied_on()))
    else:
        record = recorded(json.loads(RECORD.read_text()), installed(), relied_on())
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        seams.PAGE.write_text(seams.with_releases(seams.PAGE.read_text("utf-8"), record), "utf-8")
    print(f"missing: {missing_imports()}")
