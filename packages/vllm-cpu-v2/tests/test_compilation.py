"""What happens on the CPU before the first function is compiled."""

from __future__ import annotations

import gc
import getpass
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_cpu_v2.compilation import OBJECTS_BETWEEN_COLLECTIONS, compiling_on_all_cores

# Nothing is compiled: each check of PyTorch's succeeds. In a process of its own, because PyTorch
# remembers the answers.
TRIED = """
from torch._inductor import cpu_vec_isa
from vllm_cpu_v2 import compilation

tried = []
cpu_vec_isa.VecISA.check_build = lambda self, code: tried.append(str(self)) or True
compilation._prepare = lambda cores, candidates: None
compilation.prepare_compiler().join()
picked = cpu_vec_isa.pick_vec_isa()
print(picked, len(set(tried)), sep=";")
"""
ELSEWHERE = """
from vllm_cpu_v2.compilation import prepare_compiler_elsewhere

process = prepare_compiler_elsewhere()
print(process and process.wait())
"""
PYTORCH_ALONE = """
from torch._inductor import cpu_vec_isa

cpu_vec_isa.VecISA.check_build = lambda self, code: True
print(*cpu_vec_isa.valid_vec_isa_list(), sep=";")
"""


def printed(code: str, **environment: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip().splitlines()[-1].split(";")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 processors only")
def test_the_choice_is_pytorchs() -> None:
    """And nothing is tried after it, because each takes the compiler seconds.

    Catches slower kernels, or a choice of the user's that is lost.
    """
    best, *others = printed(PYTORCH_ALONE)
    assert printed(TRIED) == [best, "1"]
    if "avx2" in others:
        assert printed(TRIED, ATEN_CPU_CAPABILITY="avx2") == ["avx2", str(1 + len(others))]


def test_collections_are_as_before_when_the_compiler_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), compiling_on_all_cores():
        assert gc.get_threshold() == (OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
        raise RuntimeError
    assert gc.get_threshold() == before


def test_nothing_is_prepared_twice(tmp_path: Path) -> None:
    """Catches a process at every start."""
    (tmp_path / f"torchinductor_{getpass.getuser()}" / "precompiled_headers").mkdir(parents=True)
    assert printed(ELSEWHERE, TMPDIR=str(tmp_path)) == ["None"]


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_process_precompiles_the_header(tmp_path: Path) -> None:
    assert printed(ELSEWHERE, TMPDIR=str(tmp_path)) == ["0"]
    assert [*tmp_path.glob("torchinductor_*/precompiled_headers/*.gch")]
