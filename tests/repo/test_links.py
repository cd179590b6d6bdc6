"""Every relative link, anchor and named page exists; no mkdocs is needed."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "metal/README.md")),
    ROOT / "swift" / "Linux" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
# A page or picture that a comment, a message or a command names by its path from the root.
NAMED = re.compile(r"(?<![\w/])docs/[\w./-]+\.(?:md|png|svg|json)\b")
SECTION = re.compile(r'"([^"\n]+)"\s+in\s+(docs/[\w/-]+\.md)')
NAMING = ("python", "c_api", "swift", "metal", "tests", "tools", "benchmarks", "research", "golden")
SUFFIXES = {".py", ".h", ".cpp", ".c", ".swift", ".sh", ".md", ".metal", ".txt", ".toml", ".yml"}
# ggml's own page, which three files name as their source.
ELSEWHERE = {"docs/gguf.md"}


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """A page's anchors as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    found: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def links_of(text: str) -> list[str]:
    """The targets of a page's relative links, outside of code."""
    targets = LINK.findall(CODE.sub("``", FENCE.sub("", text)))
    return [target for target in targets if not re.match(r"\w+:", target)]


def broken(page: Path, text: str) -> list[str]:
    """Those of a page's links that lead nowhere."""
    lost = []
    for target in links_of(text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            lost.append(target)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found():
    """The check finds what it is for, and leaves code and other addresses alone."""
    text = "[a](nowhere.md) [b](CONTRIBUTING.md#no-such-heading) [c](#neither) ![d](docs/gone.png)"
    assert len(broken(ROOT / "README.md", text)) == 4
    text = "`[a](nowhere.md)` [b](https://example.org/x.md)\n\n```c\n[c](gone.md)\n```\n"
    assert broken(ROOT / "README.md", text) == []


def files_that_name_pages():
    """Sources and texts of the project, without what is installed or built."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml"))
    for folder in (*NAMING, "docs", ".github"):
        for place, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name not in {".build", "__pycache__"}]
            files = (Path(place, name) for name in names if Path(name).suffix in SUFFIXES)
            yield from (file for file in files if file != Path(__file__))


def test_pages_that_are_named_exist():
    """Comments, messages and commands name pages that exist, and sections that they have."""
    lost = []
    for file in files_that_name_pages():
        text = re.sub(r"\n\s*(?:#|//|///|\*)? ?", " ", file.read_text(errors="replace"))
        lost += [
            (str(file.relative_to(ROOT)), name)
            for name in NAMED.findall(text)
            if name not in ELSEWHERE and not (ROOT / name).exists()
        ]
        lost += [
            (str(file.relative_to(ROOT)), section)
            for section, name in SECTION.findall(text)
            if f"\n{section}\n"
            not in "\n".join(["", *HEADING.findall((ROOT / name).read_text()), ""])
        ]
    assert lost == []


def test_the_site_has_every_page_once():
    """mkdocs.yml's navigation names each page of docs/, and none that is not there."""
    named = re.findall(r"[\w/-]+\.md\b", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(named) == sorted({"index.md", *pages})
