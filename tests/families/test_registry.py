"""Which families there are, of this package and of others that are installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from vllm_dllm.families import registry
from vllm_dllm.families.block_causal.family import BlockCausalFamily


class Other(BlockCausalFamily):
    architecture = "OtherForCausalLM"
    model_class = "nowhere:OtherForCausalLM"


class SecondLLaDA2(BlockCausalFamily):
    architecture = "LLaDA2MoeModelLM"
    model_class = "nowhere:LLaDA2MoeModelLM"


class Nameless(BlockCausalFamily):
    model_class = "nowhere:Nameless"


def with_installed(monkeypatch: pytest.MonkeyPatch, **objects: str) -> dict[str, object]:
    """The installed families of an environment with these entry points, by architecture."""
    group = registry.ENTRY_POINTS
    points = [metadata.EntryPoint(name, path, group) for name, path in objects.items()]
    monkeypatch.setattr(
        registry.metadata, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    return registry.installed.__wrapped__()


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_an_installed_family(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_installed(monkeypatch, other=here("Other"))
    assert list(found) == ["OtherForCausalLM"]
    assert type(found["OtherForCausalLM"]) is Other


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module:Family", "No module named 'no_such_module'"),
        (here("NoSuchClass"), "no attribute 'NoSuchClass'"),
        (here("Nameless"), "Nameless' object has no attribute 'architecture'"),
    ],
)
def test_one_that_cannot_be_loaded_is_passed_over(
    path: str, why: str, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    found = with_installed(monkeypatch, broken=path, other=here("Other"))
    assert list(found) == ["OtherForCausalLM"]
    (message,) = {record.getMessage() for record in package_log.records}
    assert message.startswith(f"dllm: the family 'broken' ({path}) cannot be loaded")
    assert why in message


def test_two_families_of_one_architecture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"LLaDA2MoeModelLM is claimed by two .*:SecondLLaDA2"):
        with_installed(monkeypatch, second=here("SecondLLaDA2"))
