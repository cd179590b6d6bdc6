#!/usr/bin/env python3
"""Write docs/models.md: what bounded caches do with every model of the mlx-lm that is installed.

Each model is run as tests/test_model_coverage.py runs it (tests/model_coverage.py): minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from model_coverage import BOUNDED, PARTLY, REFUSED, Row, model_names, row_of  # noqa: E402

PAGE = ROOT / "docs/models.md"
HEAD = """# Models

Every module of `mlx_lm.models` that is a model, tiny and with random weights, through \
`make_prompt_cache`: its logits are those of mlx-lm's own caches while nothing is evicted; far \
beyond a budget of {small} tokens its memory has stopped to grow, positions count on, and logits \
are finite. tests/test_model_coverage.py runs all of them and fails where a row is another; this \
page is written by the same run:

    python tools/model_table.py

- **bounded**: every layer whose memory grew is bounded. Sliding windows, chunks and states are \
of fixed size already, and stay as the model made them.
- **partly**: other layers go on growing.
- **refused**: `make_prompt_cache` raises, with this reason.
- **of fixed size**: nothing grows, with or without mlx-h2o.
- **not run**: mlx-lm's own caches do not run the model where this page was written.

*keys made of the rows*: the model makes keys and values of the cached rows (MLA), or repeats or \
casts them: one budget for all heads, no remainder, rows as they come. *by keys alone*: the model \
computes attention by itself, so the policy looks at keys, and the remainder goes in as plain \
rows. *shared by layers*: several layers attend to one cache's rows, and a token's mass is that of \
all their queries. Vision and other wrappers are run with their language part.

mlx-lm {version}: {counts}. Of the {growing} whose memory grows, {bounded} are bounded \
({percent} %).

| model | memory | layers |
|---|---|---|
"""


def page_of(rows: list[Row], small: int) -> str:
    """The page for these rows."""
    counts = Counter(row.memory for row in rows)
    bounded = counts[BOUNDED]
    growing = bounded + counts[PARTLY] + counts[REFUSED]
    head = HEAD.format(
        small=small,
        version=version("mlx-lm"),
        counts=", ".join(f"{count} {memory}" for memory, count in counts.most_common()),
        growing=growing,
        bounded=bounded,
        percent=100 * bounded // growing,
    )
    return head + "".join(f"{row}\n" for row in rows)


def main() -> int:
    """Run all models; a model that fails is told, and the page stays as it was."""
    from model_coverage import SMALL

    rows, failed = [], []
    for name in model_names():
        try:
            rows.append(row_of(name))
            print(rows[-1], file=sys.stderr)
        except Exception as error:
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if failed:
        print(f"docs/models.md was left as it is: {', '.join(failed)} failed.", file=sys.stderr)
        return 1
    PAGE.write_text(page_of(rows, SMALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
