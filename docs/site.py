"""A hook of MkDocs: pages that live elsewhere in the repository, and links to them.

README, CHANGELOG and others stay where code hosts look for them, with links that work there; the
site gets copies. Links to files that are no pages lead to their names alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

# Path in the repository -> path in docs/.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
}
ORIGIN = {site: source for source, site in MOVED.items()}
LINK = re.compile(r"\[([^\]\n]*)\]\((?!https://)([^)\s#]+\.(?:md|png|json)|LICENSE)(#[^)\s]*)?\)")
REFERENCE = "reference.md"
MODULES = ("kernels", "likelihoods", "metrics", "plotting", "export")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/ and the reference."""
    for source, site in MOVED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, site, content=content))
    files.append(File.generated(config, REFERENCE, content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the repository to links as they are on the site."""
    site = page.file.src_uri
    source = ORIGIN.get(site, f"docs/{site}")
    folder = posixpath.dirname(source)

    def moved(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(folder, link))
        there = MOVED.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            return f"`{target}`" if text.strip("`") == posixpath.basename(target) else text
        relative = posixpath.relpath(there, posixpath.dirname(site) or ".")
        return f"[{text}]({relative}{anchor or ''})"

    return LINK.sub(moved, markdown)


def _reference() -> str:
    """Docstrings of everything public."""
    parts = ["# Docstrings", "[The API page](api.md) has the same by topic, and more."]
    for name in ("GPClassifier", "GibbsGPClassifier", "FitOptions"):
        parts.append(f"::: conjugp.{name}\n    options:\n      inherited_members: true")
    parts += [f"::: conjugp.{module}" for module in MODULES]
    return "\n\n".join(parts) + "\n"
