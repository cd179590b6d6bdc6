"""What the documentation shows, works."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import mlx_h2o
from benchmarks import __main__ as benchmarks
from mlx_h2o.cli import main, parser
from mlx_h2o.loading import demo_model
from mlx_h2o.policies import registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page):
    """A page's path from the root, by which a test of it is called."""
    return str(page.relative_to(ROOT))


# A snippet, and the block right behind a line of words that says what it prints.
PRINTS = re.compile(r"\n[^`]*^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def runs_the_real_model(page):
    """Which takes over ten seconds of processor time."""
    return demo_model.NAME in "".join(FENCE.findall(page.read_text()))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * runs_the_real_model(page), id=name_of(page))
        for page in PAGES
        if FENCE.search(page.read_text())
    ],
)
def test_python_snippets_run(page, tmp_path, monkeypatch, capsys):
    """A page's snippets run one after another, as a reader would type them, and print what the
    page says that they print."""
    if runs_the_real_model(page):
        try:
            demo_model.path()
        except ValueError as error:
            pytest.skip(f"the real model is not to be had: {error}")
    monkeypatch.chdir(tmp_path)
    # A policy that a page registers is gone after the page.
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    names: dict[str, object] = {"__name__": "docs"}
    try:
        text = page.read_text()
        for snippet in FENCE.finditer(text):
            capsys.readouterr()
            exec(compile(snippet[1], str(page), "exec"), names)
            if promised := PRINTS.match(text, snippet.end()):
                assert capsys.readouterr().out == promised[1]
    finally:
        mlx_h2o.uninstall()
        mlx_h2o.install()


def test_readme_shows_python():
    """The check above is not empty: the README and the policies' page have snippets."""
    for page in (ROOT / "README.md", ROOT / "docs" / "reference" / "policies.md"):
        assert FENCE.search(page.read_text()), page
    readme = (ROOT / "README.md").read_text()
    assert PRINTS.match(readme, FENCE.search(readme).end())
    names = re.findall(r"\bmlx_h2o\b[. ]*(\w+)", "".join(FENCE.findall(readme)))
    assert set(names) <= set(mlx_h2o.__all__)  # nothing that is private


@pytest.mark.parametrize(
    "command",
    "generate chat serve compress describe evaluate tune calibrate inspect benchmarks".split(),
)
def test_options_in_the_docs_exist(command, capsys):
    """Every option that a page gives to a command is one that it takes."""
    own = command != "benchmarks"
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"]) if own else benchmarks.main(["--help"])
    assert stop.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        typed = f"mlx_h2o {command}" if own else r"python -m benchmarks(?![\w.])"
        for line in re.findall(rf"{typed}([^\n`]*)", page.read_text()):
            assert set(re.findall(r"--[a-z-]+", line)) <= known, (page.name, line)


def test_every_command_and_every_public_name_has_its_line():
    """The reference pages name all commands and all that `import mlx_h2o` gives."""
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    given = parser().format_help().partition("COMMAND\n")[2].partition("options:")[0]
    names = re.findall(r"^ {4}(\w+)", given, re.MULTILINE)
    assert len(names) > 12
    assert [name for name in names if f"\n| `{name}` |" not in commands] == []
    python = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in mlx_h2o.__all__ if not re.search(rf"`{name}\b", python)] == []


NAMED_TEST = re.compile(r"`([\w/.-]+\.(?:py|swift|c))::(\w+)`")
COMPATIBILITY = ROOT / "docs" / "reference" / "compatibility.md"


def rows_of(page):
    """The cells of a page's table rows, without heads and rules."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "feature"]


@cache
def names_in(source):
    """What a test file's functions are called."""
    text = source.read_text()
    if source.suffix == ".py":
        return {node.name for node in ast.walk(ast.parse(text)) if hasattr(node, "name")}
    if source.suffix == ".swift":
        return set(re.findall(r"\bfunc (\w+)\(", text))
    return set(re.findall(r"^\w[\w *]*?(\w+)\(", text, re.MULTILINE))


def test_every_feature_names_a_test_that_exists():
    rows = rows_of(COMPATIBILITY)
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 4, row
        assert re.match("works|partly|refused", row[1]), row
        assert NAMED_TEST.search(row[3]), row
        for file, name in NAMED_TEST.findall(row[3]):
            assert name in names_in(ROOT / file), (file, name)
