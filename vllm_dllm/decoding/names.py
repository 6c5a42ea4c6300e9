"""The names of all algorithms, for lists of them and for refusals."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_dllm.decoding.base import Algorithm, Corruption
from vllm_dllm.decoding.registry import get_algorithm, registered_names
from vllm_dllm.ranges import SettingsError, closest, listed, shown

# The kinds of models, as error messages name them.
MODELS: Mapping[Corruption, str] = {
    "mask": "masked models",
    "uniform": "models that denoise random tokens (DiffusionGemma)",
}


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
