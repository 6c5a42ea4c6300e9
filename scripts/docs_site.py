"""MkDocs hook: the repository's own documents as pages of the site, and links that work on both.

Documents link to each other and to files of the repository by relative paths, as they are read in
a checkout. On the site the pages of `docs/` stand at the top, `ROOT_PAGES` beside them, and every
other file only has an address where `repo_url` is set; without it such a link becomes its text.
A link to a file that does not exist is a warning, which a strict build refuses.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Document at the top of the repository -> its page.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
DOCUMENT_OF = {page: document for document, page in ROOT_PAGES.items()}
BRANCH = "main"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#|/")

log = logging.getLogger("mkdocs.plugins.docs_site")


def on_files(files: Any, config: Any) -> Any:
    """Add the documents at the top of the repository."""
    for document, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the relative links of a page."""
    del files
    here = page.file.src_uri
    document = DOCUMENT_OF.get(here, f"docs/{here}")

    def mended(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if EXTERNAL.match(target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", document, path)
        elif path in ROOT_PAGES or path.startswith("docs/"):
            page_of_it = ROOT_PAGES.get(path, path.removeprefix("docs/"))
            address = posixpath.relpath(page_of_it, posixpath.dirname(here) or ".")
            return f"{image}[{text}]({address}{hash_sign}{anchor})"
        elif config.repo_url:
            return (
                f"[{text}]({config.repo_url.rstrip('/')}/blob/{BRANCH}/{path}{hash_sign}{anchor})"
            )
        return text

    return LINK.sub(mended, markdown)
