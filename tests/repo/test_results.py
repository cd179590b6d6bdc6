"""The tables in the documentation are what their commands print, or say that they are not."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from mlx_h2o.policies import registry

ROOT = Path(__file__).parents[2]
results = runpy.run_path(str(ROOT / "tools" / "results.py"))
Block, blocks_of, block_text = (results[name] for name in ("Block", "blocks_of", "block_text"))
records_of, record_for = results["records_of"], results["record_for"]
# Settings are those of a fresh process, where nobody has registered a policy of their own.
OWN_POLICIES = {
    name: policy
    for name, policy in registry._POLICIES.items()
    if policy.__module__.startswith("mlx_h2o.")
}
BLOCKS = [block for page in results["PAGES"] for block in blocks_of(page)]
DATED = re.compile(r"^Printed \d{4}-\d\d-\d\d at commit [0-9a-f]{7,}[,;].* BLAS", re.MULTILINE)
EXAMPLE = "evaluate --preset compare --size perplexity.samples=2"
# A table outside of a block: the paragraph before it says so, and when.
BY_HAND = re.compile(
    r"gathered by hand, \d{4}-\d\d-\d\d[^\n]*\n\n<!-- by hand -->\n\n(?:^\|.*\n)+", re.MULTILINE
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.command[:60])
def test_a_blocks_command_still_means_what_it_meant(block, monkeypatch):
    """It parses, and no option or default has changed since its table was printed."""
    monkeypatch.setattr(registry, "_POLICIES", OWN_POLICIES)
    assert block.differences() == [], f'make results ONLY="{block.command}"'
    assert DATED.search(block.body), block.command
    if not block.settings:
        assert "with the settings of then" in block.body
    assert "\n| " in block.body


@pytest.mark.parametrize("page", results["PAGES"], ids=lambda page: page.name)
def test_every_table_stands_in_a_block(page):
    left = results["BLOCK"].sub("", page.read_text())
    assert left.count("<!-- results") == left.count("<!-- end") == 0
    assert re.findall(r"(?:^\|.*\n)+", BY_HAND.sub("", left), re.MULTILINE) == []


@pytest.mark.parametrize("page", results["PAGES"], ids=lambda page: page.name)
def test_a_pages_json_holds_its_tables(page):
    """The JSON beside a page has the page's blocks and no other, with the same tables."""
    blocks = {block.command: block for block in blocks_of(page)}
    records = records_of(page)
    assert list(records) == list(blocks)
    for command, block in blocks.items():
        assert records[command] == record_for(block)
        assert records[command]["printed"]
        assert all(
            len(row) == len(table["columns"])
            for table in records[command]["tables"]
            for row in table["rows"]
        )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/results/data").glob("*.json")), ids=lambda path: path.name
)
def test_tables_of_earlier_pages_are_data(path):
    """Each has its columns and rows; those that a command printed have their commit."""
    for name, record in json.loads(path.read_text()).items():
        assert record["tables"]
        assert record.get("printed") or name.startswith("tables gathered by hand")
        for table in record["tables"]:
            assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_a_table_by_hand_has_the_figures_of_its_data():
    """One that says from which file of data/ it was gathered."""
    page = (ROOT / "docs/results/index.md").read_text()
    mark = r"from `(docs/[\w/.-]+)`[^\n]*\n\n<!-- by hand -->\n\n((?:\|.*\n)+)"
    gathered = re.findall(mark, page)
    assert len(gathered) == 2
    for path, table in gathered:
        figures = re.findall(r"[+-]\d[\d.]* ± [\d.]+ %|\d+/2\d", table)
        assert figures
        assert [one for one in figures if f'"{one}"' not in (ROOT / path).read_text()] == []


def test_no_table_was_lost_when_pages_were_joined():
    """data/ keeps what pages no longer show; a table that two records share counts once."""
    files = (ROOT / "docs/results/data").glob("*.json")
    records = [record for path in files for record in json.loads(path.read_text()).values()]
    tables = [table for record in records for table in record["tables"]]
    assert len({json.dumps([table["columns"], table["rows"]]) for table in tables}) >= 164


def block_of(command, **settings):
    return Block(Path("page.md"), command, settings, "")


def test_a_changed_default_is_told(monkeypatch):
    now = block_of(f"mlx_h2o {EXAMPLE}").settings_now()
    assert "samples=2" in now["perplexity"]
    assert now["chunk"] == "256"
    assert block_of(f"mlx_h2o {EXAMPLE}", **now).differences() == []
    then = {**now, "chunk": "512", "gone": "1"}
    ours = "mlx-h2o:bits=16"
    then[ours] = now[ours].replace("recent=0.25", "recent=0.1")
    told = block_of(f"mlx_h2o {EXAMPLE}", **then).differences()
    assert [line.split(": ")[0] for line in told] == ["chunk", "gone", ours]
    demo = block_of("mlx_h2o demo").settings_now()
    assert demo["model"] == "smollm2-135m"
    monkeypatch.setattr("mlx_h2o.cli.demo.MAX_SIZE", 64)
    told = block_of("mlx_h2o demo", **demo).differences()
    assert told == [f"max_size: {demo['max_size']} -> 64"]


@pytest.mark.parametrize(
    "command", ["mlx_h2o evaluate --sample-size 3", "mlx_h2o evaluate --preset x"]
)
def test_a_command_that_no_longer_parses_fails(command):
    with pytest.raises(SystemExit):
        block_of(command).differences()


def test_no_other_program_is_run():
    with pytest.raises(ValueError, match="no command of mlx_h2o"):
        block_of("rm -r docs").differences()


def test_a_block_is_read_as_it_was_written(tmp_path):
    page = tmp_path / "page.md"
    first = block_text("mlx_h2o demo", "title\n\n| a | b |\n|---|---|\n| 1 |   |\n\nPrinted")
    page.write_text(f"before\n\n{first}\nbetween\n{block_text('mlx_h2o evaluate', 'old')}\n")
    demo, evaluate = blocks_of(page)
    assert (demo.command, evaluate.command) == ("mlx_h2o demo", "mlx_h2o evaluate")
    assert (demo.settings, evaluate.settings, evaluate.body) == ({}, {}, "\nold\n")
    settings = {"a": "1 = one", "b, c": "x(y=2)"}
    record = record_for(Block(page, demo.command, settings, demo.body))
    assert record["tables"] == [{"title": "title", "columns": ["a", "b"], "rows": [["1", ""]]}]
    results["write_records"](
        page, {"mlx_h2o evaluate": record_for(evaluate), "mlx_h2o demo": record, "gone": {}}
    )
    assert list(records_of(page)) == ["mlx_h2o demo", "mlx_h2o evaluate"]
    assert next(blocks_of(page)).settings == settings


def test_one_block_is_printed_anew(tmp_path, monkeypatch):
    """Its table, date, commit, BLAS and settings; the rest of the page stays."""
    page = tmp_path / "page.md"
    command = "mlx_h2o evaluate --preset compare --measures perplexity --policies"
    page.write_text(f"{block_text(command, 'old')}\n\n{block_text('mlx_h2o demo', 'another')}\n")
    results["write_records"](page, {b.command: record_for(b) for b in blocks_of(page)})
    scope = results["main"].__globals__
    monkeypatch.setitem(scope, "PAGES", (page,))
    table = "title\n\n| cache | loss |\n|---|---:|\n| full cache | +0.00 % |\n"
    said = []

    def output_of(command):
        said.append(command)
        return table if "--markdown" in command else "abcdef0\n"

    monkeypatch.setitem(scope, "_output_of", output_of)
    monkeypatch.setattr(sys, "argv", ["results.py", "mlx_h2o evaluate"])
    results["main"]()
    assert len(said) == 2
    fresh, same = blocks_of(page)
    assert table.strip() in fresh.body
    assert "at commit abcdef0; BLAS: " in fresh.body
    assert DATED.search(fresh.body)
    assert "prefill=128" in fresh.settings["perplexity"]
    assert fresh.differences() == []
    assert records_of(page)[command] == record_for(fresh)
    assert records_of(page)[command]["commit"] == "abcdef0"
    assert same.body == "\nanother\n"
