"""Schemas with instances that are known to be valid or not: the standard's own suite, real schemas.

The suite is in ``tests/data/json_schema_test_suite``. The real schemas are read in
place (``../shared/json_schemas``); where they are absent, there are none.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canvas_grammar_support.checkout import DATA, ROOT

SUITE = DATA / "json_schema_test_suite" / "suite.tar.xz"
REAL = ROOT.parent / "shared" / "json_schemas" / "schemas.jsonl.gz"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
LATEST = "draft2020-12"


@dataclass(frozen=True)
class Case:
    """A schema, and JSON values with whether they are valid and why.

    Attributes:
        name: unique in all corpora; of the suite it begins with ``suite/<draft>/<part>/``, where
            the part is ``required`` or ``optional``.
        draft: a key of `DRAFTS`.
        schema: names its draft in ``$schema`` unless it is true or false.
    """

    name: str
    draft: str
    schema: Any
    instances: tuple[tuple[Any, bool, str], ...]


@functools.cache
def suite_files() -> Mapping[str, Any]:
    """The content of each JSON file of the suite, by its path."""
    files = {}
    with lzma.open(SUITE) as unpacked, tarfile.open(fileobj=unpacked) as archive:
        for member in archive:
            if member.name.endswith(".json"):
                content = archive.extractfile(member)
                assert content is not None
                files[member.name] = json.loads(content.read())
    return files


@functools.cache
def suite_cases() -> tuple[Case, ...]:
    """The required cases of all five drafts, and the optional ones.

    Without those that ask a validator to read what `contentEncoding` and `contentMediaType`
    describe, as it may up to draft-07; they are annotations here, as in later drafts.
    """
    cases = []
    for path, groups in suite_files().items():
        if not path.startswith("tests/") or path.startswith("tests/draft7/optional/content"):
            continue
        _, draft, rest = path.removesuffix(".json").split("/", 2)
        part = rest if rest.startswith("optional/") else f"required/{rest}"
        for number, group in enumerate(groups):
            name = f"suite/{draft}/{part}/{number}: {group['description']}"
            tests = ((test["data"], test["valid"], test["description"]) for test in group["tests"])
            cases.append(Case(name, draft, with_draft(group["schema"], draft), tuple(tests)))
    return tuple(cases)


@functools.cache
def real_cases() -> tuple[Case, ...]:
    """Schemas that people wrote; none where the file is not beside the project."""
    if not REAL.exists():
        return ()
    cases = []
    with gzip.open(REAL, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            name, draft = f"real/{record['group']}/{record['id']}", draft_of(record["schema"])
            tests = tuple((test["data"], test["valid"], "") for test in record["tests"])
            cases.append(Case(name, draft, with_draft(record["schema"], draft), tests))
    return tuple(cases)


def draft_of(schema: Any) -> str:
    """The draft that ``$schema`` names; the latest where it names none or another dialect."""
    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    for draft, url in DRAFTS.items():
        if isinstance(named, str) and _place(named) == _place(url):
            return draft
    return LATEST


def with_draft(schema: Any, draft: str) -> Any:
    """The schema with ``$schema``, which the suite leaves out in older drafts."""
    if not isinstance(schema, Mapping) or "$schema" in schema or draft == LATEST:
        return schema
    return {"$schema": DRAFTS[draft]} | dict(schema)


def _place(url: str) -> str:
    return url.removesuffix("#").partition("://")[2]
