"""Whether a fact of a conversation's beginning is known far beyond the trained context.

    python -m research.endless TEXT [--tokens 4000 10000] [--slots 256]

One fact is planted in the first tokens of each prompt (`--within`), prose follows, and the fact is
asked for at the end. The prompt is read in chunks, the question as a chunk of its own but for its
last token. Caches have the same number of slots: at absolute positions, and at rolling ones, each
with and without evicted rows that come back from a file of all rows. "All pages" reads every row
for its attention mass instead of those of the likeliest pages: what is lost beside it is lost by
the choice of pages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o import Returns, Spill, make_prompt_cache
from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.evaluate.recall import FORMS
from research.returning import Asked, answers_known, planted

ROLLING: dict[str, Any] = {"positions": "rolling", "remainder": False}
#: More pages than any conversation here has.
EVERY_PAGE = Returns(pages=4096)


def lengthened(prompts: Sequence[Asked], prose: list[int], tokens: int) -> list[Asked]:
    """The same prompts with prose before their questions, so that each has so many tokens.

    Args:
        prompts: Prompts with their facts, of one length.
        prose: Tokens of prose, each prompt's from another place.
        tokens: T of the new prompts.
    """
    more, longer = tokens - len(prompts[0].text) - len(prompts[0].question), []
    for i, asked in enumerate(prompts):
        first = i * (len(prose) - more) // len(prompts)
        longer.append(replace(asked, text=asked.text + prose[first : first + more]))
    return longer


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="builtin:recall-4m")
    made.add_argument("--form", choices=sorted(FORMS), default="questions")
    made.add_argument("--tokens", type=int, nargs="+", default=[4000, 10000])
    made.add_argument("--within", type=int, default=1000, help="tokens in which the fact is told")
    made.add_argument("--slots", type=int, default=256)
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--seed", type=int, default=3)
    made.add_argument("--only", nargs="+", help="caches, by name")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    use_openblas()
    model, tokenizer = mlx_h2o.load(args.model)
    text = args.text.read_text()
    prose = list(tokenizer.encode(text, add_special_tokens=False))
    short = planted(tokenizer, text, args, args.within)
    print("| tokens | cache | facts | rows read a token |\n|---:|---|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def ours(spill: Spill | None, **given: Any) -> Callable[[], list[Any]]:
            return lambda: make_prompt_cache(model, args.slots, spill=spill, **given)

        caches: dict[str, Callable[[], list[Any]]] = {
            "full cache": lambda: stock_cache(model),
            "absolute": ours(None),
            "absolute, rows come back": ours(Spill(Path(folder))),
            "rolling": ours(None, **ROLLING),
            "rolling, rows come back": ours(Spill(Path(folder)), **ROLLING),
            "rolling, all pages": ours(Spill(Path(folder), returns=EVERY_PAGE), **ROLLING),
        }
        for tokens in [args.within, *args.tokens]:
            prompts = lengthened(short, prose, tokens)
            for name, make in caches.items():
                if args.only and name not in args.only:
                    continue
                found = answers_known(model, prompts, make, name)
                known = f"{sum(found.scores):.0f} of {len(found.scores)}"
                print(f"| {tokens:,} | {name} | {known} | {found.rows_read:.1f} |", flush=True)


if __name__ == "__main__":
    main()
