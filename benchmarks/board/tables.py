"""The board as Markdown tables, and where we lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.board.cells import Cell, Found
from benchmarks.board.rivals import FULL, OURS, Rival
from benchmarks.board.summaries import Interval, Summary, summed_up
from benchmarks.board.tasks import GROWING, HARD_NEEDLES, NEEDLES, TEXTS_TASK
from mlx_h2o.evaluate.contenders import label

#: Places of a divergence in nats.
PLACES = 4
COLUMNS = (
    "rival",
    "KL, nats (95 %)",
    "over ours (95 %)",
    "likeliest changed",
    "perplexity",
    NEEDLES,
    HARD_NEEDLES,
    "bytes counted",
    "held",
    "ms a token",
)
NOTHING = "-"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table under its title; a column of figures is set right."""
    right = columns[1] == COLUMNS[1]
    rule = "|---|" + ("---:|" if right else "---|") * (len(columns) - 1)
    lines = ["| " + " | ".join(columns) + " |", rule]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([title, "", *lines, ""])


def summaries(
    found: Mapping[Cell, Found],
    model: str,
    rivals: Sequence[Rival],
    shares: Sequence[float],
    task: str = TEXTS_TASK,
) -> list[Summary]:
    """The figures of all rivals that ran on a model's texts, or on another task of that kind."""
    return [
        summed_up(found, model, rival.name, share, task)
        for share in (None, *shares)
        for rival in rivals
        if rival.keeps_all == (share is None)
        and "kl" in found.get(Cell(model, task, rival.name, share), {})
    ]


def tables_of(
    found: Mapping[Cell, Found],
    model: str,
    rivals: Sequence[Rival],
    shares: Sequence[float],
    plain: int,
    element: int,
) -> Iterator[str]:
    """A model's tables: one for each part of the bytes, and one for caches that keep everything.

    Args:
        found: All cells.
        model: The model.
        rivals: The rivals in the board's order.
        shares: Parts of the bytes.
        plain: Bytes of a prompt's full 16-bit cache.
        element: Bytes of a number in this run's dtype, in which caches are held.
    """
    of_model = summaries(found, model, rivals, shares)
    samples = len(found.get(Cell(model, TEXTS_TASK, FULL, None), {}).get("kl", []))
    grows = {rival.name for rival in rivals if rival.prompts_only}
    for share in (*shares, None):
        rows = [
            cells_of(one, plain, element, one.rival in grows)
            for one in sorted(of_model, key=lambda one: one.kl)
            if one.share == share
        ]
        if rows:
            given = f"{label(share)} of the bytes" if share else "every token, own bytes"
            yield table(f"{model}, {given}, {samples} samples of texts", COLUMNS, rows)
    growing = summaries(found, model, rivals, shares, GROWING)
    for share in (*shares, None):
        ranked = sorted(growing, key=lambda one: one.kl)
        if rows := [distance(one, False) for one in ranked if one.share == share]:
            given = f"{label(share)} of the bytes" if share else "every token, own bytes"
            yield table(f"{model}, {given}, texts token by token", COLUMNS[: len(rows[0])], rows)


def cells_of(one: Summary, plain: int, element: int, grows: bool) -> list[str]:
    """A row of a table."""
    facts = [
        "/".join(map(str, one.facts.get(task, ()))) or NOTHING for task in (NEEDLES, HARD_NEEDLES)
    ]
    return [
        *distance(one, grows),
        *facts,
        f"{one.counted / plain:.3f}",
        f"{one.held / plain * 2 / element:.3f}",
        f"{1000 * one.token_seconds:.1f}",
    ]


def distance(one: Summary, grows: bool) -> list[str]:
    """A row's first columns: the rival, and how far it is from the full cache and from ours."""
    over = NOTHING
    if one.over_ours is not None and one.over_interval is not None:
        over = f"{one.over_ours:+.{PLACES}f} {_interval(one.over_interval, '+')}"
    name = f"**{one.rival}**" if one.rival == OURS else one.rival
    return [
        f"{name} †" if grows else name,
        f"{one.kl:.{PLACES}f} {_interval(one.kl_interval)}",
        over,
        f"{one.changed:.1%}",
        f"{100 * one.loss:+.1f} %",
    ]


def _interval(of: Interval, sign: str = "") -> str:
    return f"[{of[0]:{sign}.{PLACES}f}, {of[1]:{sign}.{PLACES}f}]"


LOST_COLUMNS = ("rival", "model", "bytes", "measure", "its figure", "ours", "by more than chance")


def lost(
    found: Mapping[Cell, Found], model: str, rivals: Sequence[Rival], shares: Sequence[float]
) -> list[list[str]]:
    """Rows that say where a rival is better than our default with the same bytes."""
    of_model = summaries(found, model, rivals, shares)
    ours = {one.share: one for one in of_model if one.rival == OURS}
    rows = []
    for one in of_model:
        if one.share is None or one.rival.startswith(OURS) or one.share not in ours:
            continue
        own, place = ours[one.share], [one.rival, model, label(one.share)]
        if one.over_ours is not None and one.over_ours < 0:
            figures = f"{one.kl:.{PLACES}f}", f"{own.kl:.{PLACES}f}"
            rows.append([*place, "KL, nats", *figures, "yes" if one.beats_ours else "no"])
        for task, (known, asked) in one.facts.items():
            if known > own.facts.get(task, (asked, asked))[0]:
                rows.append(
                    [*place, task, f"{known}/{asked}", f"{own.facts[task][0]}/{asked}", NOTHING]
                )
    return rows


def failures(found: Mapping[Cell, Found], models: Sequence[str]) -> list[list[str]]:
    """Rows that say which rivals did not run, and why; equal reasons share a row."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for cell, scores in found.items():
        if "failed" in scores and cell.model in models:
            place = label(cell.share) if cell.share else "own bytes"
            reasons.setdefault((cell.rival, cell.model, scores["failed"]), []).append(
                f"{cell.task} {place}"
            )
    return [
        [rival, model, ", ".join(places), why.replace("|", "/").replace("\n", " ")]
        for (rival, model, why), places in reasons.items()
    ]


def settings_of(rivals: Sequence[Rival]) -> list[list[str]]:
    """Rows that say each rival's settings and source."""
    return [
        [
            f"{one.name} †" if one.prompts_only else one.name,
            one.settings,
            f"<{one.source}>" if one.source else "this project",
        ]
        for one in rivals
    ]
