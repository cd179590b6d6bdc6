"""The pages' pictures come from committed scripts, and the site's hooks keep links right."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name):
    return runpy.run_path(str(ROOT / "tools" / name))


def test_the_chart_of_the_results_has_every_size_and_cache():
    """What it draws is read from the JSON of the tables, as the tables say it."""
    results = tool("draw_results.py")
    losses, facts = results["losses"](), results["facts"]()
    assert {name: [size for size, *_ in points] for name, points in losses.items()} == {
        key: [512, 256, 128, 64] for key in ("sliding window", "H2O", "mlx-h2o")
    }
    assert list(facts) == ["mlx-lm, 4 bits", "sliding window", "mlx-h2o", "H2O"]
    assert all(
        list(known) == [256, 128] for name, known in facts.items() if name != "mlx-lm, 4 bits"
    )
    page = (ROOT / "docs" / "results" / "index.md").read_text()
    size, loss, error = losses["mlx-h2o"][1]
    assert re.search(rf"\| mlx-h2o .*\| +\+{loss} ± {error} %", page)
    assert f" {facts['mlx-h2o'][size]}/23 |" in page


def test_the_chart_is_drawn(tmp_path):
    tool("draw_results.py")["draw"](tmp_path / "chart.svg")
    assert "</svg>" in (tmp_path / "chart.svg").read_text()


@pytest.mark.slow
def test_every_idea_has_its_picture(tmp_path, monkeypatch):
    """The script draws, of the embedded model, what the page shows beside the drawing of a step."""
    folder = ROOT / "docs" / "how-it-works"
    shown = set(re.findall(r"!\[[^\]]*\]\(([\w.-]+)\)", (folder / "index.md").read_text()))
    monkeypatch.setattr("sys.argv", ["draw_ideas.py", str(tmp_path)])
    tool("draw_ideas.py")["main"]()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert shown == {"step.svg", *drawn}
    assert all((folder / name).exists() for name in shown)


def test_the_readme_becomes_a_page_of_the_site():
    hooks = tool("site_hooks.py")
    text = (
        "[a](docs/guide/chat.md) ![b](docs/demo.png) [c](CONTRIBUTING.md) [d](https://x.org/y.md)"
    )
    page = hooks["first_page"](text)
    assert page.startswith("[a](guide/chat.md) ![b](demo.png) [c](../CONTRIBUTING.md)")
    page = hooks["without_links_out"](page, "")
    assert page.endswith("c (`CONTRIBUTING.md`) [d](https://x.org/y.md)")
    page = hooks["without_links_out"](
        "[metal/README](../../metal/README.md) [x](../demo.png)", "reference"
    )
    assert page == "`metal/README.md` [x](../demo.png)"
