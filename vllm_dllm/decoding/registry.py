"""Decoding algorithms by name: ours, those of installed packages, and dotted paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any, TypeVar

from vllm_dllm.decoding.base import Algorithm, Corruption
from vllm_dllm.settings.ranges import SettingsError, nearest, shown

ENTRY_POINTS = "vllm_dllm.algorithms"

_REGISTRY: dict[tuple[Corruption, str], Algorithm] = {}

AlgorithmType = TypeVar("AlgorithmType", bound=Callable[[], Algorithm])


def register_algorithm(cls: AlgorithmType) -> AlgorithmType:
    """Class decorator: make an algorithm available under its ``name``.

    The same name may stand once for masked models and once for those of uniform noise.

    Raises:
        ValueError: the name is taken.
    """
    algorithm = cls()
    key = algorithm.corruption, algorithm.name
    if key in _REGISTRY and type(_REGISTRY[key]) is not cls:
        raise ValueError(f"decoding algorithm {algorithm.name!r} is registered twice")
    _REGISTRY.setdefault(key, algorithm)
    return cls


@cache
def load_installed() -> None:
    """Register what installed packages offer in the entry-point group, once.

    Raises:
        SettingsError: one of them cannot be loaded; names the package's entry point.
    """
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            register_algorithm(point.load())
        except Exception as error:
            raise SettingsError(
                f"the decoding algorithm {point.name!r} ({point.value}) cannot be loaded: {error}"
            ) from error


def algorithms(corruption: Corruption) -> list[Algorithm]:
    """All registered algorithms for a kind of model, by name."""
    load_installed()
    return [_REGISTRY[key] for key in sorted(_REGISTRY) if key[0] == corruption]


def algorithm_names(corruption: Corruption) -> list[str]:
    """What users may write, presets included."""
    found = algorithms(corruption)
    return [a.name for a in found] + [f"{a.name}-{p}" for a in found for p in a.presets]


def get_algorithm(name: str, corruption: Corruption) -> tuple[Algorithm, dict[str, float]]:
    """An algorithm, and the settings that its preset brings along.

    Args:
        name: a registered name, ``<name>-<preset>``, or ``package.module:Class``.
        corruption: what the model's canvases are full of.

    Raises:
        SettingsError: there is none, or it is for the other kind of model.
    """
    if ":" in name:
        return _imported(name, corruption), {}
    load_installed()
    if (corruption, name) in _REGISTRY:
        return _REGISTRY[corruption, name], {}
    base, _, preset = name.partition("-")
    algorithm = _REGISTRY.get((corruption, base))
    if algorithm is not None and preset in algorithm.presets:
        return algorithm, dict(algorithm.presets[preset])
    other: Corruption = "uniform" if corruption == "mask" else "mask"
    if name in algorithm_names(other):
        raise SettingsError(
            f"{name} does not fit this model; it has {', '.join(algorithm_names(corruption))}"
        )
    names = algorithm_names(corruption)
    raise SettingsError(
        f"unknown decoding algorithm {shown(name)}; {nearest(name, names)} "
        f"(available: {', '.join(names)})"
    )


def _imported(path: str, corruption: Corruption) -> Algorithm:
    module, _, attribute = path.partition(":")
    try:
        cls: Any = getattr(importlib.import_module(module), attribute)
        if not hasattr(cls, "corruption"):  # calling what it names might do anything
            raise TypeError("it is no algorithm")
        register_algorithm(cls)
    except Exception as error:
        raise SettingsError(
            f"the decoding algorithm {shown(path)} cannot be loaded: {error}"
        ) from error
    algorithm = _REGISTRY[cls.corruption, cls.name]
    if algorithm.corruption != corruption:
        raise SettingsError(f"{path} does not fit this model")
    return algorithm
