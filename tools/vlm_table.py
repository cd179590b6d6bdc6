#!/usr/bin/env python3
"""Write docs/reference/vision-models.md: the results of bounded caches with mlx-vlm's models.

Each named module's language model is run as tests/models/test_vlm_coverage.py runs it; the other
rows stay. Without names all of mlx-vlm's modules are run, in five minutes. A module that ends the
process or takes all memory needs a smaller config (tests/vlm_models.py), or a place among FATAL.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from model_coverage import BOUNDED, PARTLY, REFUSED, SMALL  # noqa: E402
from model_rows import rows_of, table_of  # noqa: E402
from vlm_coverage import FAILS, vlm_line  # noqa: E402
from vlm_models import vlm_names  # noqa: E402

PAGE = ROOT / "docs/reference/vision-models.md"
#: What is not said by "are".
VERBS = {FAILS: "fail"}
HEAD = """# Models of mlx-vlm

Which models of mlx-vlm are bounded, layer by layer, as [models](models.md) shows of mlx-lm's. \
The language model of a module of `mlx_vlm.models` is run tiny, with random weights, through \
`make_prompt_cache`; what sees images is not run here. Rows *packed* in 8 bits give logits near \
mlx-vlm's own, but those of hrm_text are *far off*: it repeats its layers, and with random weights \
multiplies any error by hundreds. Modules with equal results share a row; one without a row \
generates no tokens. `python tools/vlm_table.py` writes this page.

Written with mlx-vlm {version}. Of the {run} modules {counts}. Of the {growing} among them whose \
memory was seen to grow, {bounded} are bounded ({percent} %).

| module | memory | layers | packed |
|---|---|---|---|
"""


def page_of(rows: Sequence[str]) -> str:
    """The page with these lines."""
    counts = Counter(row.split(" | ")[1] for row in rows)
    verdicts = [f"{count} {VERBS.get(of, f'are {of}')}" for of, count in counts.most_common()]
    growing = counts[BOUNDED] + counts[PARTLY] + counts[REFUSED] + counts[FAILS]
    head = HEAD.format(
        small=SMALL,
        version=version("mlx-vlm"),
        counts=", ".join(verdicts),
        growing=growing,
        run=len(rows),
        bounded=counts[BOUNDED],
        percent=100 * counts[BOUNDED] // growing,
    )
    return head + table_of(rows)


def main(names: Sequence[str]) -> int:
    """Run modules, and write the page."""
    rows = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for name in names or vlm_names():
        rows[name] = vlm_line(name)
        print(rows[name] or f"{name} generates no tokens", file=sys.stderr, flush=True)
        rows = {name: row for name, row in rows.items() if row}
        lines = [rows[name] for name in sorted(rows)]
        PAGE.write_text(page_of(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
