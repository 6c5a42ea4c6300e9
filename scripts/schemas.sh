#!/usr/bin/env bash
# Check the plain Kubernetes objects of examples/deploy against Kubernetes' own schemas, strictly: an
# unknown field is an error. The schemas come with a package of 108 MB, which is not among the
# development tools; it goes into .venv-schemas.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-schemas
package=kubernetes-validate==1.37.0
if [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" != "$package" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install -q "$package"
    echo "$package" >"$venv/.setup-stamp"
fi
# The oldest version that has every field, and the newest that the package knows.
"$venv/bin/kubernetes-validate" --strict -k 1.30 -k 1.37 examples/deploy/kubernetes.yaml
