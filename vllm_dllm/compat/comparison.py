"""What of a vLLM is not as it is in the one that this package is tested with."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dllm.compat.definitions import Definitions
from vllm_dllm.compat.fingerprints import Thing, fingerprint
from vllm_dllm.compat.scan import Scan, Use

# The kinds of changes, in the order in which they are told.
REMOVED, SIGNATURE, BODY, ADDED = "removed", "signature changed", "body changed", "added"
KINDS = (REMOVED, SIGNATURE, BODY, ADDED)


@dataclass(frozen=True)
class Change:
    """Something that we rely on and that is different.

    Attributes:
        kind: one of `KINDS`.
        what: where the tested vLLM defines it; for what was added, where the other one does.
        uses: where we use it.
        before: its signature in the tested vLLM.
        after: its signature in the other one.
        elsewhere: modules of the other one that define something of its name, where it is gone.
    """

    kind: str
    what: str
    uses: tuple[Use, ...]
    before: str = ""
    after: str = ""
    elsewhere: tuple[str, ...] = ()


def compare(things: list[Thing], scan: Scan, vllm: Definitions) -> list[Change]:
    """The changes of a vLLM.

    Args:
        things: what was recorded of the tested vLLM.
        scan: of our source.
        vllm: the other one.
    """
    found = [change for thing in things for change in _changes(thing, scan, vllm)]
    found += _added(things, scan, vllm)
    return sorted(found, key=_order)


def _order(change: Change) -> tuple[int, bool, str]:
    """What we only inherit comes after what we name."""
    inherited = all(use.how == "inherited" for use in change.uses)
    return KINDS.index(change.kind), inherited, change.what


def _changes(thing: Thing, scan: Scan, vllm: Definitions) -> list[Change]:
    """At most one change of each kind: the paths to one thing may lead to different ones now."""
    old, paths = thing
    by_kind: dict[str, list[str]] = {}
    after: dict[str, str] = {}
    for path in paths:
        definition = vllm.find(path)
        if definition is None:
            kind = REMOVED
        else:
            new = fingerprint(definition)
            if new.signature != old.signature:
                kind, after[SIGNATURE] = SIGNATURE, new.signature
            elif new.body != old.body:
                kind, after[BODY] = BODY, new.signature
            else:
                continue
        by_kind.setdefault(kind, []).append(path)
    return [
        Change(
            kind,
            old.place,
            _uses(changed, scan),
            old.signature,
            after.get(kind, ""),
            _elsewhere(old.place, vllm) if kind == REMOVED else (),
        )
        for kind, changed in by_kind.items()
    ]


def _uses(paths: list[str], scan: Scan) -> tuple[Use, ...]:
    """Where we use what these paths lead to, or else our classes that inherit it."""
    direct = {use for path in paths for use in scan.uses.get(path, ())}
    if direct:
        return tuple(sorted(direct))
    classes = {path.rpartition(".")[0] for path in paths}
    return tuple(
        sorted(
            use._replace(how="inherited")
            for cls in classes
            for use in scan.uses.get(cls, ())
            if use.how == "subclassed"
        )
    )


def _elsewhere(place: str, vllm: Definitions) -> tuple[str, ...]:
    name = place.partition(":")[2]
    return tuple(vllm.elsewhere(name)) if name and "." not in name else ()


def _added(things: list[Thing], scan: Scan, vllm: Definitions) -> list[Change]:
    """What vLLM's classes did not have, and now have under the name of a method of ours."""
    known = {path for thing in things for path in thing.paths}
    found = []
    for path, uses in scan.uses.items():
        ours = tuple(sorted(use for use in uses if use.how == "overridden"))
        definition = vllm.find(path) if ours and path not in known else None
        if definition is not None:
            new = fingerprint(definition)
            found.append(Change(ADDED, new.place, ours, after=new.signature))
    return found
