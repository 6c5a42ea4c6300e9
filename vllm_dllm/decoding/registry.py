"""Decoding algorithms by name: built-in ones, those of installed packages, and import paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, TypeVar

from vllm_dllm.decoding.base import Algorithm, Corruption
from vllm_dllm.ranges import SettingsError, closest, listed, shown

ENTRY_POINTS = "vllm_dllm.algorithms"
# The kinds of models, as error messages name them.
MODELS: Mapping[Corruption, str] = {
    "mask": "masked models (LLaDA2, SDAR)",
    "uniform": "models that denoise random tokens (DiffusionGemma)",
}

# What an algorithm must have; most of it comes from its base class.
ALGORITHM_PARTS = [
    *Algorithm.__annotations__,
    *(method for method in vars(Algorithm) if not method.startswith("_")),
]

_REGISTRY: dict[tuple[Corruption, str], Algorithm] = {}

AlgorithmType = TypeVar("AlgorithmType", bound=Callable[[], Algorithm])


def register_algorithm(cls: AlgorithmType) -> AlgorithmType:
    """Class decorator: make an algorithm available under its ``name``.

    The same name may be used once for masked models and once for models of uniform noise.

    Raises:
        TypeError: it lacks a part of `Algorithm`, such as `step`.
        ValueError: the name is taken.
    """
    algorithm = cls()
    missing = [part for part in ALGORITHM_PARTS if not hasattr(algorithm, part)]
    if missing:
        raise TypeError(f"{cls.__name__} does not define {listed(missing)}")
    key = algorithm.corruption, algorithm.name
    if key in _REGISTRY and type(_REGISTRY[key]) is not cls:
        raise ValueError(f"decoding algorithm {algorithm.name!r} is registered twice")
    _REGISTRY.setdefault(key, algorithm)
    return cls


@cache
def load_installed() -> None:
    """Register the algorithms that installed packages offer as entry points, once.

    Raises:
        SettingsError: one of them cannot be loaded; the message names its entry point.
    """
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            register_algorithm(point.load())
        except Exception as error:
            raise SettingsError(
                f"the decoding algorithm {point.name!r} ({point.value}) cannot be loaded: {error}"
            ) from error


def algorithms(corruption: Corruption) -> list[Algorithm]:
    """All registered algorithms for a kind of model, sorted by name."""
    load_installed()
    return [_REGISTRY[key] for key in sorted(_REGISTRY) if key[0] == corruption]


def algorithm_names(corruption: Corruption) -> list[str]:
    """The names that users may write, including those of presets."""
    known = algorithms(corruption)
    return [a.name for a in known] + [f"{a.name}-{p}" for a in known for p in a.presets]


def get_algorithm(name: str, corruption: Corruption) -> tuple[Algorithm, dict[str, float]]:
    """The algorithm with this name, and the settings of its preset.

    Args:
        name: a registered name, ``<name>-<preset>``, or ``package.module:Class``.
        corruption: what fills the model's fresh canvases: masks or uniform noise.

    Raises:
        SettingsError: there is no such algorithm, or it is for the other kind of model.
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
    names, others = algorithm_names(corruption), algorithm_names(other_kind(corruption))
    unknown = f"unknown decoding algorithm {shown(name)}"
    meant = closest(name, [*names, *others])
    if meant is not None and meant not in names:
        raise SettingsError(
            ("" if meant == name else f"{unknown}; ")
            + f"{meant} does not fit this model, because it is for "
            f"{MODELS[other_kind(corruption)]}; choose {listed(names, 'or')}"
        )
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    raise SettingsError(f"{unknown}{hint} (available: {', '.join(names)})")


def other_kind(corruption: Corruption) -> Corruption:
    """The other kind of model."""
    return "uniform" if corruption == "mask" else "mask"


def _imported(path: str, corruption: Corruption) -> Algorithm:
    """Import and register the algorithm ``package.module:Class``; raises `SettingsError`."""
    module, _, attribute = path.partition(":")
    try:
        cls: Any = getattr(importlib.import_module(module), attribute)
        if not hasattr(cls, "corruption"):  # do not call an object that is not an algorithm
            raise TypeError("it is not an algorithm")
        register_algorithm(cls)
    except Exception as error:
        raise SettingsError(
            f"the decoding algorithm {shown(path)} cannot be loaded: {error}"
        ) from error
    algorithm = _REGISTRY[cls.corruption, cls.name]
    if algorithm.corruption != corruption:
        raise SettingsError(
            f"{path} does not fit this model, because it is for {MODELS[algorithm.corruption]}"
        )
    return algorithm
