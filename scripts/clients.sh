#!/usr/bin/env bash
# Put the clients that cannot live beside vLLM into .venv-clients: they pin older packages.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv-clients/bin/python ] || .venv/bin/python -m venv .venv-clients
.venv-clients/bin/python -m pip --disable-pip-version-check install -q \
    'litellm>=1.100,<2' mcp 'instructor>=1.15,<2' # LiteLLM imports mcp without asking for it
