"""The board as Markdown tables, and where we lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.board.cells import Cell, Outcome
from benchmarks.board.rivals import FULL, OURS, Rival
from benchmarks.board.ruler import KINDS
from benchmarks.board.summaries import Interval, Summary, facts_known, summed_up
from benchmarks.board.tasks import (
    GROWING,
    HARD_NEEDLES,
    MEMORY,
    NEEDLES,
    RULER,
    RULER_SHARE,
    SPEAKERS,
    TEXTS_TASK,
)
from mlx_h2o.evaluate.methods import share_label

#: Places of a divergence in nats.
PLACES = 4
MIB = 2**20
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
    "peak, MiB",
    "ms a token",
)
NOTHING = "-"
#: Tasks of texts that have tables of their own, and how their titles name them.
MORE_TEXTS = {SPEAKERS: "plays of several speakers", GROWING: "texts token by token"}


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = False
) -> str:
    """A Markdown table under its title; columns of figures are set right."""
    rule = "|---|" + ("---:|" if figures else "---|") * (len(columns) - 1)
    lines = ["| " + " | ".join(columns) + " |", rule]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([title, "", *lines, ""])


def filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The columns that have a figure in some row, and the rows with those alone."""
    which = [i for i in range(len(rows[0])) if any(row[i] != NOTHING for row in rows)]
    return [columns[i] for i in which], [[row[i] for i in which] for row in rows]


def summaries(
    outcomes: Mapping[Cell, Outcome],
    model: str,
    rivals: Sequence[Rival],
    shares: Sequence[float],
    task: str = TEXTS_TASK,
) -> list[Summary]:
    """The figures of all rivals that ran on a model's texts, or on another task of that kind."""
    return [
        summed_up(outcomes, model, rival.name, share, task)
        for share in (None, *shares)
        for rival in rivals
        if rival.keeps_all == (share is None)
        and "kl" in outcomes.get(Cell(model, task, rival.name, share), {})
    ]


def tables_of(
    outcomes: Mapping[Cell, Outcome],
    model: str,
    rivals: Sequence[Rival],
    shares: Sequence[float],
    plain: int,
    element: int,
) -> Iterator[str]:
    """A model's tables: one for each part of the bytes, and one for caches that keep everything.

    Args:
        outcomes: All cells.
        model: The model.
        rivals: The rivals in the board's order.
        shares: Parts of the bytes.
        plain: Bytes of a prompt's full 16-bit cache.
        element: Bytes of a number in this run's dtype, in which caches are held.
    """
    of_model = summaries(outcomes, model, rivals, shares)
    samples = len(outcomes.get(Cell(model, TEXTS_TASK, FULL, None), {}).get("kl", []))
    peak = outcomes.get(Cell(model, MEMORY, FULL, None), {}).get("peak")
    most = f"; the full cache's peak is {peak / MIB:.1f} MiB" if peak is not None else ""
    grows = {rival.name for rival in rivals if rival.prompts_only}
    for share in (*shares, None):
        rows = [
            cells_of(one, plain, element, one.rival in grows)
            for one in sorted(of_model, key=lambda one: one.kl)
            if one.share == share
        ]
        if rows:
            heading = _heading(share)
            title = f"{model}, {heading}, {samples} samples of texts{most}"
            yield table(title, *filled(COLUMNS, rows), True)
    for task, title in MORE_TEXTS.items():
        ranked = sorted(summaries(outcomes, model, rivals, shares, task), key=lambda one: one.kl)
        for share in (*shares, None):
            if rows := [distance(one, one.rival in grows) for one in ranked if one.share == share]:
                heading = _heading(share)
                yield table(f"{model}, {heading}, {title}", *filled(COLUMNS, rows), True)
    if not of_model:
        yield from facts_tables(outcomes, model, rivals, shares)
    yield from ruler_tables(outcomes, model, rivals)


def facts_tables(
    outcomes: Mapping[Cell, Outcome], model: str, rivals: Sequence[Rival], shares: Sequence[float]
) -> Iterator[str]:
    """Needles alone, of a run that read no texts."""
    tasks = NEEDLES, HARD_NEEDLES
    for share in (*shares, None):
        ranked = []
        for rival in rivals:
            each = [facts_known(outcomes, model, task, rival.name, share) for task in tasks]
            if rival.keeps_all == (share is None) and any(each):
                name = _named(rival.name, rival.prompts_only)
                ranked.append((-sum(of[0] for of in each if of), [name, *map(_of, each)]))
        if ranked:
            heading = _heading(share)
            rows = [row for _, row in sorted(ranked, key=lambda one: one[0])]
            yield table(f"{model}, {heading}, facts", *filled(("rival", *tasks), rows), True)


def ruler_tables(
    outcomes: Mapping[Cell, Outcome], model: str, rivals: Sequence[Rival]
) -> Iterator[str]:
    """RULER's tasks: answers that come, of those that the full cache gives."""
    full = {kind: outcomes.get(Cell(model, f"{RULER} {kind}", FULL, None), {}) for kind in KINDS}
    kinds_in_reach = [kind for kind in KINDS if any(full[kind].get("known", []))]
    measured = {
        kind for rival in rivals for kind in ruler_facts(outcomes, model, rival, kinds_in_reach)
    }
    kinds = [kind for kind in kinds_in_reach if kind in measured]
    ranked = []
    for rival in rivals:
        by_kind = ruler_facts(outcomes, model, rival, kinds)
        if by_kind:
            whole = _summed(by_kind) if len(by_kind) == len(kinds) else None
            name = _named(rival.name, rival.prompts_only)
            cells = [_of(by_kind.get(kind)) for kind in kinds]
            ranked.append((-(whole or (-1, 0))[0], [name, *cells, _of(whole)]))
    if ranked:
        share = share_label(RULER_SHARE)
        title = f"{model}, RULER, {share} of the bytes or, with every token, own bytes"
        rows = [row for _, row in sorted(ranked, key=lambda one: one[0])]
        yield table(title, ("rival", *kinds, "all"), rows, True)


def ruler_facts(
    outcomes: Mapping[Cell, Outcome], model: str, rival: Rival, kinds: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """A rival's answers of RULER, known and asked, by kind; kinds without a cell are left out."""
    share = None if rival.keeps_all else RULER_SHARE
    facts = {
        kind: facts_known(outcomes, model, f"{RULER} {kind}", rival.name, share) for kind in kinds
    }
    return {kind: of for kind, of in facts.items() if of is not None}


def _summed(by_kind: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    right, total = (sum(of) for of in zip(*by_kind.values(), strict=True))
    return right, total


def _of(facts: tuple[int, int] | None) -> str:
    return NOTHING if facts is None else "/".join(map(str, facts))


def _heading(share: float | None) -> str:
    return f"{share_label(share)} of the bytes" if share else "every token, own bytes"


def _named(name: str, grows: bool) -> str:
    """A rival in a table: with a dagger if it keeps all of a continuation, ours in bold."""
    return f"{name} †" if grows else f"**{name}**" if name == OURS else name


def cells_of(one: Summary, plain: int, element: int, grows: bool) -> list[str]:
    """A row of a table."""
    facts = [_of(one.facts.get(task)) for task in (NEEDLES, HARD_NEEDLES)]
    return [
        *distance(one, grows),
        *facts,
        f"{one.counted / plain:.3f}",
        f"{one.held / plain * 2 / element:.3f}",
        NOTHING if one.peak is None else f"{one.peak / MIB:.1f}",
        f"{1000 * one.token_seconds:.1f}",
    ]


def distance(one: Summary, grows: bool) -> list[str]:
    """A row's first columns: the rival, and how far it is from the full cache and from ours."""
    over = NOTHING
    if one.over_ours is not None:
        over = f"{one.over_ours:+.{PLACES}f}"
        over += f" {_interval(one.over_interval, '+')}" if one.over_interval is not None else ""
    return [
        _named(one.rival, grows),
        f"{one.kl:.{PLACES}f} {_interval(one.kl_interval)}",
        over,
        f"{one.changed:.1%}",
        f"{100 * one.loss:+.1f} %",
    ]


def _interval(of: Interval, sign: str = "") -> str:
    return f"[{of[0]:{sign}.{PLACES}f}, {of[1]:{sign}.{PLACES}f}]"


LOST_COLUMNS = ("rival", "model", "bytes", "measure", "its figure", "ours", "by more than chance")


def lost(
    outcomes: Mapping[Cell, Outcome], model: str, rivals: Sequence[Rival], shares: Sequence[float]
) -> list[list[str]]:
    """Rows that say where a rival is better than our default with the same bytes."""
    rows = []
    for task in (TEXTS_TASK, *MORE_TEXTS):
        of_model = summaries(outcomes, model, rivals, shares, task)
        ours = {one.share: one for one in of_model if one.rival == OURS}
        for one in of_model:
            if one.share is None or one.rival.startswith(OURS) or one.share not in ours:
                continue
            own, place = ours[one.share], [one.rival, model, share_label(one.share)]
            if one.over_ours is not None and one.over_ours < 0:
                measure = "KL, nats" if task == TEXTS_TASK else f"KL of {task}, nats"
                figures = f"{one.kl:.{PLACES}f}", f"{own.kl:.{PLACES}f}"
                chance = NOTHING if one.over_interval is None else "no"
                rows.append([*place, measure, *figures, "yes" if one.beats_ours else chance])
    return [
        *rows,
        *_lost_facts(outcomes, model, rivals, shares),
        *_lost_ruler(outcomes, model, rivals),
    ]


def _lost_facts(
    outcomes: Mapping[Cell, Outcome], model: str, rivals: Sequence[Rival], shares: Sequence[float]
) -> Iterator[list[str]]:
    """The same for needles, of which no texts need to have been read."""
    for share in shares:
        for task in (NEEDLES, HARD_NEEDLES):
            own = facts_known(outcomes, model, task, OURS, share)
            for rival in rivals:
                theirs = facts_known(outcomes, model, task, rival.name, share)
                if theirs is None or own is None or rival.name.startswith(OURS):
                    continue
                if theirs[0] > own[0]:
                    place = [rival.name, model, share_label(share)]
                    yield [*place, task, _of(theirs), _of(own), NOTHING]


def _lost_ruler(
    outcomes: Mapping[Cell, Outcome], model: str, rivals: Sequence[Rival]
) -> Iterator[list[str]]:
    """The same for RULER, over the kinds that both were asked for."""
    own = next((ruler_facts(outcomes, model, one, KINDS) for one in rivals if one.name == OURS), {})
    for rival in rivals:
        theirs = ruler_facts(outcomes, model, rival, KINDS) if not rival.keeps_all else {}
        both = own.keys() & theirs.keys()
        if rival.name.startswith(OURS) or not both:
            continue
        theirs_right, ours = (_summed({kind: of[kind] for kind in both}) for of in (theirs, own))
        if theirs_right[0] > ours[0]:
            place = [rival.name, model, share_label(RULER_SHARE)]
            yield [*place, RULER, _of(theirs_right), _of(ours), NOTHING]


def failures(outcomes: Mapping[Cell, Outcome], models: Sequence[str]) -> list[list[str]]:
    """Rows that say which rivals did not run, and why; equal reasons share a row."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    # In one order, whatever the order in which they were measured.
    for cell, scores in sorted(outcomes.items(), key=lambda one: (*one[0][:3], one[0].share or 0)):
        if "failed" in scores and cell.model in models:
            place = share_label(cell.share) if cell.share else "own bytes"
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
