"""What the documentation shows, works."""

import re
from pathlib import Path

import pytest

from mlx_h2o.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_run(page, tmp_path, monkeypatch):
    """A page's snippets run one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for snippet in FENCE.findall(page.read_text()):
        exec(compile(snippet, str(page), "exec"), names)


def test_readme_shows_python():
    """The check above is not empty: the README and the policies' page have snippets."""
    for page in (ROOT / "README.md", ROOT / "docs" / "policies.md"):
        assert FENCE.search(page.read_text()), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Relative links point at files that exist."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("command", ["generate", "compare", "calibrate", "inspect", "bench"])
def test_options_in_the_docs_exist(command, capsys):
    """Every option that a page gives to a command is one that it takes."""
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for line in re.findall(rf"mlx_h2o {command}([^\n`]*)", page.read_text()):
            assert set(re.findall(r"--[a-z-]+", line)) <= known, (page.name, line)
