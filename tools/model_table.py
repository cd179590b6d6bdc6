#!/usr/bin/env python3
"""Write docs/reference/models.md: the results of bounded caches with every model of mlx-lm.

Each model is run as tests/models/test_model_coverage.py runs it (tests/model_matrix.py),
which takes minutes. If models are named, only their rows are run again, and the others stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from model_coverage import BOUNDED, PARTLY, REFUSED, SMALL, model_names  # noqa: E402
from model_matrix import COLUMNS, LENGTHS, YES, line_of  # noqa: E402
from model_rows import cells_of, rows_of, table_of  # noqa: E402

PAGE = ROOT / "docs/reference/models.md"
HEAD = """# Models

Which models of mlx-lm are bounded, layer by layer. Each is run tiny, with random weights, through \
`make_prompt_cache`. While nothing is evicted its logits must be those of mlx-lm's own caches. Far \
beyond a budget of {small} tokens its memory must have stopped growing. Models with equal results \
share a row. `python tools/model_table.py` writes this page.

- **bounded**: every layer whose memory grew is bounded. Sliding windows, chunks and states are \
of fixed size already, and stay as the model made them. **partly**: other layers still grow.
- **refused**: `make_prompt_cache` raises, with this reason.
- **not run**: mlx-lm's own caches do not run the model where this page was written.

*keys made of the rows*: the model makes keys and values of the cached rows (MLA), or sees blocks \
of places (phi3small): one budget for all heads, no remainder, dense rows. *shared by layers*: \
several layers attend to one cache's rows. *by keys alone*: the policy looks at keys, and the \
remainder goes in as plain rows. Vision and other wrappers are run with their language part.

- **packed, keys scaled**: with `bits=8` and key scaling, logits are near mlx-lm's own while \
nothing is evicted, and memory is bounded. *refused*: `bits` raises a ValueError.
- **batches**: sequences of {first} and {second} tokens in one `BatchGenerator` give what each \
gives alone, with evictions. *one at a time*: mlx-lm's server takes its sequences one after \
another; ours computes them side by side. *nor mlx-lm's own*: mlx-lm's own caches do not either.
- **server**: over HTTP, alone, four at once and after a restart, answers are the model's own, \
within `--kv-memory`.
- **profile**: `mlx_h2o calibrate` measures each head. *one budget*: all heads need the same \
number of slots there.

Written with mlx-lm {version}; `make test-old-mlx-lm` holds mlx-lm {previous} to the same rows. \
{counts}. Of the {growing} whose memory grows, {bounded} are bounded ({percent} %); of those \
{packed} can be packed, {batched} batched, {served} served, and {profiled} have profiles.

| model | {columns} |
|---|{rule}
"""


def page_of(lines: Sequence[str]) -> str:
    """The page with these lines."""
    rows = [cells_of(line) for line in lines]
    counts = Counter(row[1] for row in rows)
    growing = counts[BOUNDED] + counts[PARTLY] + counts[REFUSED]
    bounded = [row for row in rows if row[1] == BOUNDED]
    packed, batched, served, profiled = (
        sum(row[i] == YES for row in bounded) for i in (3, 4, 5, 6)
    )
    columns = " | ".join(COLUMNS)
    head = HEAD.format(
        small=SMALL,
        first=LENGTHS[0],
        second=LENGTHS[1],
        version=version("mlx-lm"),
        previous=previous(),
        counts=", ".join(f"{count} are {memory}" for memory, count in counts.most_common()),
        growing=growing,
        bounded=counts[BOUNDED],
        percent=100 * counts[BOUNDED] // growing,
        packed=packed,
        batched=batched,
        served=served,
        profiled=profiled,
        columns=columns,
        rule="---|" * len(columns.split(" | ")),
    )
    return head + table_of(lines)


def previous() -> str:
    """The release of mlx-lm that the Makefile's tests run besides the newest."""
    match = re.search(r"^PREVIOUS_MLX_LM := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match, "the Makefile names no PREVIOUS_MLX_LM"
    return match[1]


def main(arguments: Sequence[str]) -> int:
    """Run models; if one fails, print that and leave the page unchanged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="whose rows are run anew; all if none is named")
    names = parser.parse_args(arguments).models
    lines = rows_of(PAGE.read_text(encoding="utf-8")) if names else {}
    failed = []
    for name in names or model_names():
        try:
            lines[name] = line_of(name)
            print(lines[name], file=sys.stderr)
        except Exception as error:
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if failed:
        print(
            f"docs/reference/models.md was left as it is: {', '.join(failed)} failed.",
            file=sys.stderr,
        )
        return 1
    PAGE.write_text(page_of([lines[name] for name in sorted(lines)]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
