"""Which families there are, and that nothing outside of them asks for a model by name."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from vllm_dllm.families import registry
from vllm_dllm.families.block_causal.family import BlockCausalFamily

PACKAGE = Path(registry.__file__).resolve().parents[1]
OURS = (
    *("LLaDA2MoeModelLM", "DiffusionGemmaForBlockDiffusion"),
    *("SDARForCausalLM", "SDARMoeForCausalLM"),
    *("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"),
    *("LLaDA22MoeModelLM",),
    "Fast_dLLM_QwenForCausalLM",
)


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


def test_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DLLM_NATIVE", raising=False)
    assert set(registry.served_architectures()) >= set(OURS)


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


def test_only_a_family_knows_its_model() -> None:
    """No other file compares architectures, or asks whether canvases are masked."""
    special = re.compile("|".join([r"architecture\s*==", *OURS, r"\bis_masked\b"]))
    own = [PACKAGE / "families" / folder for folder, _ in registry.OURS.values()]
    own.append(Path(registry.__file__))
    found = [
        f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if not any(file.is_relative_to(folder) for folder in own)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if special.search(line)
    ]
    assert found == []
