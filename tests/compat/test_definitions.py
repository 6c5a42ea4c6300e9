"""Where a path leads in a vLLM that is only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.planted import plant
from vllm_dllm.compat.definitions import Definitions
from vllm_dllm.compat.sources import in_folder


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("vllm.config", "vllm.config"),
        ("vllm:config", "vllm.config"),
        ("vllm.config:EngineConfig", "vllm.config.engine:EngineConfig"),
        ("vllm.config:EngineConfig()", "vllm.config.engine:EngineConfig()"),
        ("vllm.config:EngineConfig().double", "vllm.config.engine:EngineConfig.double"),
        ("vllm.config.engine:current().model.step", "vllm.model:Model.step"),
        ("vllm.config:EngineConfig().model.load", "vllm.model:Root.load"),
        ("vllm.model:Model().path", "vllm.model:Root.path"),
        ("vllm.model:Model()", "vllm.model:Model.__init__"),
        ("vllm.model:Kind.TEXT.readable", "vllm.model:Kind.readable"),
        ("vllm.model:work", "vllm.model:work"),
        ("vllm.model:loads", "vllm.model:loads"),
        ("vllm.config.engine:current()", None),
        ("vllm.model:Model.gone", None),
        ("vllm.model:gone", None),
        ("vllm.gone:Model", None),
    ],
)
def test_paths(tmp_path: Path, path: str, place: str | None) -> None:
    found = Definitions(in_folder(plant(tmp_path))).find(path)
    assert (found and found.place) == place


def test_members_are_those_of_all_classes_of_vllm(tmp_path: Path) -> None:
    vllm = Definitions(in_folder(plant(tmp_path)))
    assert vllm.members("vllm.model:Model") == ["__init__", "kind", "load", "step"]


def test_circles_of_imports_end(tmp_path: Path) -> None:
    plant(tmp_path)
    (tmp_path / "vllm/a.py").write_text("from vllm.b import x\n")
    (tmp_path / "vllm/b.py").write_text("from vllm.a import x\nfrom vllm.b import *\n")
    assert Definitions(in_folder(tmp_path)).find("vllm.a:x") is None
