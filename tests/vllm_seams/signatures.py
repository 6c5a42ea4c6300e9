"""What this package relies on in vLLM: names that it wraps, overrides or inherits from.

    .venv/bin/python -m tests.vllm_seams.signatures

writes their signatures to ``signatures.json``, which `test_signatures` compares. It imports every
module of the package and starts an engine, because some functions are wrapped only then.
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

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_dllm"
RECORD = Path(__file__).with_name("signatures.json")
Names = dict[str, dict[str, str]]


def relied_on() -> Names:
    """The signature of each name, in the groups ``wrapped``, ``overridden`` and ``inherited``."""
    wrapped = _record_wraps()
    _start_an_engine()
    from vllm.v1.engine.input_processor import InputProcessor

    found: Names = {"wrapped": {}, "overridden": {}, "inherited": {}}
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
    return {group: dict(sorted(names.items())) for group, names in found.items()}


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


def signature(owner: Any, name: str) -> str:
    """The parameters without types and default values: their names, kinds and order."""
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


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    place = Path(sys.argv[1]) if sys.argv[1:] else RECORD
    place.write_text(json.dumps(relied_on(), indent=1) + "\n")
    print(f"missing: {missing_imports()}")
