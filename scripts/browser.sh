#!/usr/bin/env bash
# Put Playwright into .venv-browser, an environment that sees the packages of .venv.
# The browser is the system's: Debian's package `chromium`, or what CHROMIUM names.
set -euo pipefail
cd "$(dirname "$0")/.."

chromium=${CHROMIUM:-$(command -v chromium || true)}
if [ -z "$chromium" ]; then
    echo "browser: no chromium; install it (Debian: apt-get install chromium), or set CHROMIUM" >&2
    exit 1
fi
venv=.venv-browser
wanted=$(cat tests/viewer/requirements.txt scripts/browser.sh .venv/.setup-stamp | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
beside=$(.venv/bin/python -c "$purelib")
echo "import site; site.addsitedir('$beside')" >"$("$venv/bin/python" -c "$purelib")/beside.pth"
echo "browser: installing into $venv ..."
"$venv/bin/python" -m pip --disable-pip-version-check install -q -r tests/viewer/requirements.txt
echo "$wanted" >"$venv/.setup-stamp"
