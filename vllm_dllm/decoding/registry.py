"""Decoding algorithms by name: built-in ones, those of installed packages, and import paths."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any, TypeVar

from vllm_dllm.decoding.base import Algorithm, Corruption
from vllm_dllm.ranges import SettingsError, closest, listed, shown

ENTRY_POINTS = "vllm_dllm.algorithms"
# Algorithms by the kind of model and the name that users write. A built-in one is a module of this
# package and a class, until it is asked for.
_REGISTRY: dict[tuple[Corruption, str], Algorithm | str] = {
    ("mask", "ConfidenceThreshold"): "thresholds:ConfidenceThreshold",
    ("mask", "Credit"): "credit:Credit",
    ("mask", "EntropyBound"): "entropy_bound:MaskedEntropyBound",
    ("mask", "EntropyBounded"): "entropy_bound:EntropyBounded",
    ("mask", "FixedSteps"): "quota:FixedSteps",
    ("mask", "FrechetProfile"): "thresholds:FrechetProfile",
    ("mask", "Hierarchical"): "thresholds:Hierarchical",
    ("mask", "JointThreshold"): "joint_threshold:JointThreshold",
    ("mask", "JointThresholdInDel"): "joint_threshold_in_del:JointThresholdInDel",
    ("mask", "Leftmost"): "quota:Leftmost",
    ("mask", "LinearSpec"): "thresholds:LinearSpec",
    ("mask", "LowConfidence"): "thresholds:LowConfidence",
    ("mask", "LowConfidenceDynamic"): "quota:LowConfidenceDynamic",
    ("mask", "LowConfidenceEven"): "quota:LowConfidenceEven",
    ("mask", "LowConfidenceStatic"): "quota:LowConfidenceStatic",
    ("mask", "Sequential"): "quota:Sequential",
    ("mask", "SubBlocks"): "sub_blocks:SubBlocks",
    ("mask", "TokenEntropyBounded"): "entropy_bound:TokenEntropyBounded",
    ("uniform", "EntropyBound"): "entropy_bound:EntropyBound",
}

# The kinds of models, as error messages name them.
MODELS: Mapping[Corruption, str] = {
    "mask": "masked models",
    "uniform": "models that denoise random tokens (DiffusionGemma)",
}

AlgorithmType = TypeVar("AlgorithmType", bound=type[Algorithm])


def register_algorithm(cls: AlgorithmType) -> AlgorithmType:
    """Class decorator: make an algorithm available under its ``name``.

    The same name may be used once for masked models and once for models of uniform noise.

    Raises:
        TypeError: it does not inherit from `Algorithm`, or does not define its name or `step`.
        ValueError: the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"it does not inherit from {__package__}.{Algorithm.__name__}")
    missing = [*cls.__abstractmethods__, *(() if hasattr(cls, "name") else ("name",))]
    if missing:
        raise TypeError(f"{cls.__name__} does not define {listed(missing)}")
    algorithm = cls()
    key = algorithm.corruption, algorithm.name
    other = _registered(*key)
    if other is not None and type(other) is not cls:
        raise ValueError(f"decoding algorithm {algorithm.name!r} is registered twice")
    _REGISTRY.setdefault(key, algorithm)
    return cls


def _registered(corruption: Corruption, name: str) -> Algorithm | None:
    """The algorithm that is registered under exactly this name; None if there is none."""
    found = _REGISTRY.get((corruption, name))
    if isinstance(found, str):
        made: Algorithm = _class_at(f"vllm_dllm.decoding.{found}")()
        _REGISTRY[corruption, name] = found = made
    return found


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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


def registered_names(corruption: Corruption) -> list[str]:
    """The names of all registered algorithms for a kind of model, without presets, sorted."""
    load_installed()
    return sorted(name for kind, name in _REGISTRY if kind == corruption)


def get_algorithm(name: str, corruption: Corruption) -> tuple[Algorithm, dict[str, float]]:
    """The algorithm with this name, and the settings of its preset.

    `name` is a registered name, ``<name>-<preset>``, or ``package.module:Class``.

    Raises:
        SettingsError: there is no such algorithm, or it is for the other kind of model.
    """
    if ":" in name:
        return _imported(name, corruption), {}
    load_installed()
    algorithm = _registered(corruption, name)
    if algorithm is not None:
        return algorithm, {}
    base, _, preset = name.partition("-")
    algorithm = _registered(corruption, base)
    if algorithm is not None and preset in algorithm.presets:
        return algorithm, dict(algorithm.presets[preset])
    raise refusal(name, corruption)


def _imported(path: str, corruption: Corruption) -> Algorithm:
    """Import and register ``package.module:Class``; raises `SettingsError`."""
    try:
        cls = register_algorithm(_class_at(path))
    except Exception as error:
        raise SettingsError(
            f"the decoding algorithm {shown(path)} cannot be loaded: {error}"
        ) from error
    if cls.corruption != corruption:
        raise misfit(path, corruption)
    return get_algorithm(cls.name, corruption)[0]


def other_kind(corruption: Corruption) -> Corruption:
    """The other kind of model."""
    return "uniform" if corruption == "mask" else "mask"


def algorithms(corruption: Corruption) -> list[Algorithm]:
    """All registered algorithms for a kind of model, sorted by name; imports them."""
    return [get_algorithm(name, corruption)[0] for name in registered_names(corruption)]


def algorithm_names(corruption: Corruption, of_every_model: bool = False) -> list[str]:
    """The names that users may write, including those of presets.

    With `of_every_model`, those that fit every server of a model of this kind: they neither verify
    nor move.
    """
    known = algorithms(corruption)
    if of_every_model:
        known = [a for a in known if not (a.verifies or a.moves)]
    return [a.name for a in known] + [f"{a.name}-{p}" for a in known for p in a.presets]


def refusal(name: str, corruption: Corruption) -> SettingsError:
    """The error for a name that no algorithm for this kind of model has."""
    names, others = algorithm_names(corruption), algorithm_names(other_kind(corruption))
    unknown = f"unknown decoding algorithm {shown(name)}"
    choose = f"choose {listed(algorithm_names(corruption, of_every_model=True), 'or')}"
    meant = closest(name, [*names, *others])
    if meant is not None and meant not in names:
        start = "" if meant == name else f"{unknown}; "
        fit = misfit(meant, corruption)
        return SettingsError(f"{start}{fit}; {choose}")
    if meant is not None:
        return SettingsError(f"{unknown}; did you mean {meant!r}?")
    return SettingsError(f"{unknown}; {choose}")


def misfit(name: str, corruption: Corruption) -> SettingsError:
    """The error for an algorithm that is for the other kind of model."""
    return SettingsError(
        f"{name} does not fit this model, because it is for {MODELS[other_kind(corruption)]}"
    )
