"""Hooks of the site (mkdocs.yml): the README is its first page, and links out of docs/ are paths.

mkdocs knows only docs/. A link from a page to a file elsewhere in the repository becomes that
file's path as text; on GitHub, which shows the same pages, the link works.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def first_page(text: str) -> str:
    """The README as a page of docs/: its links are relative to there."""
    return re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/)([\w./-]+)\)", r"](../\1)", text))


def without_links_out(text: str, folder: str) -> str:
    """A page's text, in which a link to a file outside of docs/ is that file's path.

    Args:
        text: The page's Markdown.
        folder: The page's folder below docs/.
    """

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"`{target}`" if link[1].strip("`") in target else f"{link[1]} (`{target}`)"

    return LINK.sub(replaced, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md."""
    from mkdocs.structure.files import File  # only the site's environment has it

    text = first_page((ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the links of a page that lead out of docs/."""
    return without_links_out(markdown, posixpath.dirname(page.file.src_uri))
