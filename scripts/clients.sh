#!/usr/bin/env bash
# Put the clients that do not fit beside vLLM into .venv-clients.
# Does nothing when .venv-clients already holds what tests/clients/requirements.txt asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-clients
wanted=$(cat tests/clients/requirements.txt scripts/clients.sh | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/guidellm" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# guidellm imports torch and computes nothing with it. The build of .venv is at hand already, and
# where its CPU build was found this one is found, too.
echo "clients: installing into $venv ..."
"${pip[@]}" install -q torch==2.13.0
"${pip[@]}" install -q -r tests/clients/requirements.txt torch==2.13.0
echo "$wanted" >"$venv/.setup-stamp"
