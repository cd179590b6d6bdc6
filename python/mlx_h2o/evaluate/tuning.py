"""The smallest cache within a stated loss, on the user's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_h2o.budgets.settings import DEFAULT_POLICY, PROFILES, budgets_of_model
from mlx_h2o.evaluate.measures import Results
from mlx_h2o.evaluate.measures.perplexity import LEVEL, Perplexity
from mlx_h2o.evaluate.methods import FULL, OURS, Method, parse_method, sized
from mlx_h2o.evaluate.report import Curves, Section, Table


@dataclass(frozen=True)
class Choice:
    """One point of the curve.

    Attributes:
        method: The measured cache.
        loss: The loss of perplexity, relative.
        interval: The confidence interval of the loss.
        nbytes: `nbytes` of the cache at the end of a sample.
        share: The share of a full 16-bit cache's bytes.
    """

    method: Method
    loss: float
    interval: tuple[float, float]
    nbytes: int
    share: float


def tuned_methods(
    policies: Sequence[str],
    bits: Sequence[int],
    shares: Sequence[float],
    budgets: str | None = None,
    profile: str = PROFILES[0],
) -> list[Method]:
    """The full cache, ours with bits chosen by bytes, and policies in each width, by shares.

    Each is made as its line of code makes it, so bytes are those of this model's dtype.

    Args:
        policies: As `parse_method` reads them; with the model's own profile unless they name
            budgets.
        bits: Widths of rows; 16 means dense rows.
        shares: Shares of a full 16-bit cache's bytes.
        budgets: "uniform" or a profile's path, instead of the model's own profile.
        profile: Whether a model without a profile is measured.

    Raises:
        ValueError: A policy or setting is unknown.
    """
    budgets_of_model(budgets)
    methods = [Method(OURS, DEFAULT_POLICY, budgets=budgets)]
    for policy in policies:
        for width in bits:
            method = parse_method(f"{policy}:bits={width}")
            own = method.budgets if "budgets=" in policy else budgets
            methods.append(replace(method, label=f"{policy}, {width} bits", budgets=own))
    ours = [replace(method, profile=profile, in_16_bits=False) for method in methods]
    return sized([Method(FULL), *ours], shares)


def choices(results: Results) -> list[Choice]:
    """All points, the smallest first; `results` come from `PerplexityMeasure`."""
    if not results:
        return []
    full = results[0][1]
    made = []
    for method, result in results[1:]:
        own, theirs = Perplexity(result["nll"]), Perplexity(full["nll"])
        share = result["nbytes"] / full["nbytes"]
        loss, interval = own.loss_against(theirs), own.interval_against(theirs)
        made.append(Choice(method, loss, interval, result["nbytes"], share))
    return sorted(made, key=lambda choice: (choice.nbytes, choice.loss))


def recommended(made: Sequence[Choice], most: float, surely: bool) -> Choice | None:
    """The smallest choice within the allowed loss; None if there is none.

    Args:
        made: All choices.
        most: The allowed loss, relative.
        surely: Whether the interval's upper end counts instead of the measured loss.
    """
    within = [c for c in made if (c.interval[1] if surely else c.loss) <= most]
    return min(within, key=lambda choice: (choice.nbytes, choice.loss), default=None)


def answer_of(chosen: Choice | None, most: float, text: str) -> str:
    """What to use, in a sentence.

    Args:
        chosen: The smallest choice within the loss, or None.
        most: The allowed loss.
        text: The text in words.
    """
    if chosen is None:
        return f"On {text} nothing measured loses at most {100 * most:g} %: allow more bytes."
    low, high = (100 * end for end in chosen.interval)
    return (
        f"On {text} {chosen.method.label} with {chosen.share:.1%} of the bytes costs "
        f"{100 * chosen.loss:+.2f} % ({low:+.2f} to {high:+.2f} %) of perplexity."
    )


def section(made: Sequence[Choice], chosen: Choice | None, most: float) -> Section:
    """The curve and its points, for people.

    Args:
        made: The points of the curve.
        chosen: The smallest within the loss, or None.
        most: The allowed loss.
    """
    rows = [
        (
            choice.method.name,
            f"{choice.nbytes:,}",
            f"{choice.share:.1%}",
            f"{100 * choice.loss:+.2f} %",
            f"{100 * choice.interval[0]:+.2f} to {100 * choice.interval[1]:+.2f} %",
            "<- this one" if choice is chosen else "",
        )
        for choice in made
    ]
    columns = ("cache", "KV bytes", "of full", "loss", f"{LEVEL:.0%} interval", "")
    x = sorted({choice.share for choice in made})
    lines: dict[str, dict[float, float]] = {}
    for choice in made:
        lines.setdefault(choice.method.label, {})[choice.share] = 100 * choice.loss
    curves = Curves(
        "Quality by bytes",
        x,
        {name: [line.get(at) for at in x] for name, line in lines.items()},
        "share of a full 16-bit cache's bytes",
        "perplexity above the full cache's, %",
        logarithmic=True,
    )
    title = f"The smallest cache that loses at most {100 * most:g} %"
    return Section(title, "", [Table("", columns, rows)], [curves])
