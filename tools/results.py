"""Print the tables of README.md and docs/results/*.md again, into their marked blocks.

    python tools/results.py                        every block (hours)
    python tools/results.py "mlx_h2o demo"         the blocks whose command begins so
    python tools/results.py --list                 the commands, and when each was printed

A block begins with a mark and its command, and ends with `<!-- end -->`:

    <!-- results -->

        mlx_h2o evaluate --preset compare

The JSON file beside the page holds for each command its settings, when and where it was printed,
and the tables as columns and rows. A block without settings was printed before settings were
recorded; it says at which commit. tests/repo/test_results.py fails if a command no longer parses,
if its settings have changed, or if page and JSON differ.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from mlx_h2o._blas import blas
from mlx_h2o.cli import parser

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for research, when this runs as a script
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs" / "results").glob("*.md")))
BLOCK = re.compile(
    r"^<!-- results -->\n\n {4}(?P<command>[^\n]+)\n(?P<body>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
TABLE = re.compile(r"(?:^([^|\n]+)\n\n)?((?:^\|.*\n)+)", re.MULTILINE)
# Date, commit and machine of a table, in the words that `printed` writes.
PRINTED = re.compile(r"^Printed (?P<date>\S+) at commit (?P<commit>\w+)", re.MULTILINE)
# The program of a command, or what is run as `python -m research.NAME` or `benchmarks.NAME`.
PROGRAM = "mlx_h2o"
EXPERIMENT = re.compile(r"python -m ((?:research|benchmarks)\.\w+) ")


@dataclass(frozen=True)
class Block:
    """A table and the command that printed it.

    Attributes:
        page: The page that has it.
        command: The command as a reader types it.
        settings: The settings when it was printed, by name; empty if they are not known.
        body: The table, and when and where it was printed.
    """

    page: Path
    command: str
    settings: dict[str, str]
    body: str

    @property
    def to_run(self) -> list[str]:
        """The command as this Python runs it.

        Raises:
            ValueError: The command is none that prints tables.
        """
        if named := EXPERIMENT.match(self.command):
            return [sys.executable, "-m", named[1], *shlex.split(self.command[named.end() :])]
        program, *arguments = shlex.split(self.command)
        if program != PROGRAM:
            raise ValueError(f"{self.command!r} is no command of {PROGRAM} and no experiment.")
        return [sys.executable, "-m", PROGRAM, *arguments, "--markdown"]

    def settings_now(self) -> dict[str, str]:
        """The command's current settings, by name."""
        _, _, program, *arguments = self.to_run
        if program == PROGRAM:
            args = parser().parse_args(arguments)
            return dict(args.settings(args))
        own = cast(argparse.ArgumentParser, import_module(program).parser())
        return {name: str(value) for name, value in vars(own.parse_args(arguments)).items()}

    def differences(self) -> list[str]:
        """The settings that differ from those when the table was printed."""
        now = self.settings_now()
        if not self.settings:
            return []
        return [
            f"{name}: {self.settings.get(name, 'none')} -> {now.get(name, 'none')}"
            for name in sorted(now | self.settings)
            if now.get(name) != self.settings.get(name)
        ]


def record_of(page: Path) -> Path:
    """The JSON file that belongs to a page."""
    return page.with_suffix(".json")


def records_of(page: Path) -> dict[str, Any]:
    """The JSON file's records of a page's blocks, by command."""
    record = record_of(page)
    return dict(json.loads(record.read_text())) if record.exists() else {}


def blocks_of(page: Path) -> Iterator[Block]:
    """A page's blocks, in order."""
    records = records_of(page)
    for match in BLOCK.finditer(page.read_text()):
        settings = records.get(match["command"], {}).get("settings", {})
        yield Block(page, match["command"], settings, match["body"])


def tables_in(body: str) -> list[dict[str, Any]]:
    """A block's tables: the line above each as its title, its columns, and its rows."""
    tables = []
    for title, text in TABLE.findall(body):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        tables.append({"title": title, "columns": rows[0], "rows": rows[2:]})
    return tables


def record_for(block: Block) -> dict[str, Any]:
    """The JSON file's record of a block."""
    when = PRINTED.search(block.body)
    return {
        "printed": when["date"] if when else "",
        "commit": when["commit"] if when else "",
        "settings": block.settings,
        "tables": tables_in(block.body),
    }


def write_records(page: Path, records: dict[str, Any]) -> None:
    """Write a page's JSON file: the blocks that the page has, in its order."""
    order = [match["command"] for match in BLOCK.finditer(page.read_text())]
    text = json.dumps({c: records[c] for c in order if c in records}, indent=1, ensure_ascii=False)
    record_of(page).write_text(text + "\n")


def block_text(command: str, body: str) -> str:
    """A block's text in a page."""
    return f"<!-- results -->\n\n    {command}\n\n{body}\n<!-- end -->"


def printed(block: Block, commit: str) -> Block:
    """The block, printed again."""
    table = _output_of(block.to_run)
    # Its program is imported here, which turns OpenBLAS on as it did in the run.
    settings = block.settings_now()
    note = f"Printed {date.today().isoformat()} at commit {commit}; BLAS: {blas()}."
    # rich pads the lines around a table.
    lines = "\n".join(line.rstrip() for line in table.strip().splitlines())
    lines = re.sub(r"\n{3,}", "\n\n", lines)
    return Block(block.page, block.command, settings, f"{lines}\n\n{note}")


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def main() -> None:
    """Parse and run."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("only", nargs="?", default="", help="the beginning of a command")
    options.add_argument("--list", action="store_true", help="show the commands, run nothing")
    args = options.parse_args()
    chosen = [b for page in PAGES for b in blocks_of(page) if b.command.startswith(args.only)]
    if not chosen:
        sys.exit(f"No block's command begins with {args.only!r}: see --list.")
    # Before the first page is changed.
    commit = _output_of(["git", "describe", "--always", "--dirty", "--exclude", "*"]).strip()
    if commit.endswith("dirty") and not args.list:
        sys.exit("Commit first: a table names the commit that printed it.")
    for block in chosen:
        if args.list:
            when = re.search(r"Printed (\S+ at commit \S+?)[;,.]", block.body)
            print(f"{block.page.name}: {block.command} ({when[1] if when else 'no date'})")
            continue
        print(block.command, file=sys.stderr)
        new = printed(block, commit)
        # The page is read again: a run may take an hour.
        text = block.page.read_text()
        old = next(m[0] for m in BLOCK.finditer(text) if m["command"] == block.command)
        block.page.write_text(text.replace(old, block_text(new.command, new.body), 1))
        write_records(block.page, records_of(block.page) | {block.command: record_for(new)})


if __name__ == "__main__":
    main()
