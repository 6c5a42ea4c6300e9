"""Model families by architecture: built-in ones and those of installed packages."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vllm_dllm.families.base import Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.dllm")

ENTRY_POINTS = "vllm_dllm.families"
OURS = (
    "vllm_dllm.families.llada2.family:LLaDA2",
    "vllm_dllm.families.diffusion_gemma.family:DiffusionGemma",
    "vllm_dllm.families.sdar.family:SDAR",
    "vllm_dllm.families.sdar.family:SDARMoe",
)


@cache
def families() -> dict[str, Family]:
    """All families, by architecture.

    A package whose family cannot be loaded is skipped with a warning: the others still serve.

    Raises:
        ValueError: two families claim an architecture.
    """
    found: dict[str, Family] = {}
    for family in [*map(_imported, OURS), *_installed()]:
        other = found.setdefault(family.architecture, family)
        if other is not family:
            raise ValueError(
                f"{family.architecture} is claimed by two families: {_name(other)} and "
                f"{_name(family)}"
            )
    return found


def _installed() -> list[Family]:
    """The families of other packages, by their entry points."""
    installed = []
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            installed.append(_checked(point.load()()))
        except Exception as error:
            logger.warning(
                "dllm: the family %r (%s) cannot be loaded: %r", point.name, point.value, error
            )
    return installed


def _checked(family: Any) -> Family:
    """Return the same object.

    Raises:
        TypeError: it is not a family, or its class leaves something out.
    """
    if not isinstance(family, Family):
        raise TypeError(f"{_name(family)} does not inherit from {Family.__module__}.Family")
    missing = [name for name in Family.__annotations__ if not hasattr(family, name)]
    if missing:
        raise TypeError(f"{_name(family)} does not state {', '.join(missing)}")
    return family


def _imported(path: str) -> Family:
    module, _, name = path.partition(":")
    family: Family = getattr(importlib.import_module(module), name)()
    return family


def _name(family: Any) -> str:
    return f"{type(family).__module__}.{type(family).__qualname__}"


def served_architectures() -> tuple[str, ...]:
    """The architectures that this package serves in this environment."""
    return tuple(name for name, family in families().items() if not family.left_to_vllm)


def family_of(vllm_config: VllmConfig) -> Family:
    """The family of the model that is being served."""
    return families()[vllm_config.model_config.architecture]
