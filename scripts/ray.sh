#!/usr/bin/env bash
# Put Ray into .venv-ray, an environment that sees the packages of .venv and changes none of them.
# Does nothing when .venv-ray already holds what tests/cluster/requirements.txt asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-ray
wanted=$(cat tests/cluster/requirements.txt scripts/ray.sh .venv/.setup-stamp 2>/dev/null | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/ray" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
# As a site of its own, so that the .pth files there are read, too: this package is one of them.
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
beside=$(.venv/bin/python -c "$purelib")
echo "import site; site.addsitedir('$beside')" >"$("$venv/bin/python" -c "$purelib")/beside.pth"
# What Ray shares with vLLM stays in vLLM's version.
held=$(mktemp)
trap 'rm -f "$held"' EXIT
.venv/bin/python -m pip --disable-pip-version-check list --format=freeze --exclude-editable |
    grep -v '^vllm' >"$held"
echo "ray: installing into $venv ..."
"$venv/bin/python" -m pip --disable-pip-version-check install -q -r tests/cluster/requirements.txt -c "$held"
echo "$wanted" >"$venv/.setup-stamp"

