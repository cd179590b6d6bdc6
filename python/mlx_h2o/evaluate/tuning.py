"""The smallest budget within a stated loss, on the user's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_h2o.budgets.settings import DEFAULT_POLICY, PROFILES
from mlx_h2o.evaluate.arms import FULL, OURS, Arm
from mlx_h2o.evaluate.bootstrap import loss_interval
from mlx_h2o.evaluate.contenders import Contender, arm_of
from mlx_h2o.evaluate.measures import Findings
from mlx_h2o.evaluate.perplexity import Perplexity
from mlx_h2o.evaluate.sections import Curves, Rows, Section

#: The width that means dense rows, in the model's own dtype.
PLAIN = 16


@dataclass(frozen=True)
class Choice:
    """One point of the curve.

    Attributes:
        contender: The measured cache.
        loss: The loss of perplexity, as a share.
        interval: The confidence interval of the loss.
        nbytes: Bytes at the end of a sample, counted as in a 16-bit model.
        part: The part of the full cache's bytes.
    """

    contender: Contender
    loss: float
    interval: tuple[float, float]
    nbytes: int
    part: float


def tuned_contenders(
    policies: Sequence[str],
    bits: Sequence[int],
    shares: Sequence[float],
    profile: str = PROFILES[0],
) -> list[Contender]:
    """The full cache, ours with bits chosen by bytes, and policies in each width, by shares.

    Args:
        policies: As `arm_of` reads them; with the model's own profile unless they name budgets.
        bits: Widths of rows; 16 means dense rows.
        shares: Parts of a full 16-bit cache's bytes.
        profile: Whether a model without a profile is measured.

    Raises:
        ValueError: A policy or setting is unknown.
    """
    arms = [Arm(OURS, DEFAULT_POLICY, by_bytes=True)]
    for policy in policies:
        for width in bits:
            spec = policy if "budgets=" in policy else f"{policy}:budgets=profile"
            arm = arm_of(spec if width == PLAIN else f"{spec}:bits={width}")
            arms.append(replace(arm, name=f"{policy}, {width} bits"))
    return [
        Contender(Arm(FULL)),
        *(Contender(replace(arm, profile=profile), share) for share in shares for arm in arms),
    ]


def choices(findings: Findings) -> list[Choice]:
    """All points, the smallest first; `findings` come from `PerplexityMeasure`."""
    if not findings:
        return []
    full = findings[0][1]
    made = []
    for contender, found in findings[1:]:
        loss = Perplexity(found["nll"]).loss_against(Perplexity(full["nll"]))
        interval = loss_interval(found["nll"], full["nll"])
        part = found["nbytes"] / full["nbytes"]
        made.append(Choice(contender, loss, interval, found["nbytes"], part))
    return sorted(made, key=lambda choice: (choice.nbytes, choice.loss))


def recommended(made: Sequence[Choice], most: float, surely: bool) -> Choice | None:
    """The smallest choice within the allowed loss; None if there is none.

    Args:
        made: All choices.
        most: The allowed loss, as a share.
        surely: Whether the interval's upper end counts instead of the measured loss.
    """
    within = [c for c in made if (c.interval[1] if surely else c.loss) <= most]
    return min(within, key=lambda choice: (choice.nbytes, choice.loss), default=None)


def line_of_code(choice: Choice, tokens: int) -> str:
    """The line of code that makes this cache.

    Args:
        choice: The measured cache.
        tokens: Length of the conversations in the measurement.
    """
    arm, share = choice.contender.arm, choice.contender.share
    given = [f'max_bytes="{100 * (share or 1):g}%"', f"context={tokens}"]
    if arm.policy not in (None, DEFAULT_POLICY):
        given.append(f'policy="{arm.policy}"')
    if arm.profile != PROFILES[0]:
        given.append(f'profile="{arm.profile}"')
    if not arm.by_bytes:
        given += [f"{name}={value!r}" for name, value in arm.settings if name != "bits"]
        given.append(f"bits={dict(arm.settings).get('bits', PLAIN)}")
        given += [f"budgets={arm.budgets!r}"] if arm.budgets else []
        given += [] if arm.remainder else ["remainder=False"]
    return f"cache = mlx_h2o.make_prompt_cache(model, {', '.join(given)})"


def section(made: Sequence[Choice], chosen: Choice | None, most: float) -> Section:
    """The curve and its points, for people.

    Args:
        made: The points of the curve.
        chosen: The smallest within the loss, or None.
        most: The allowed loss.
    """
    rows = [
        (
            choice.contender.name,
            f"{choice.nbytes:,}",
            f"{choice.part:.1%}",
            f"{100 * choice.loss:+.2f} %",
            f"{100 * choice.interval[0]:+.2f} to {100 * choice.interval[1]:+.2f} %",
            "<- this one" if choice is chosen else "",
        )
        for choice in made
    ]
    columns = ("cache", "KV bytes", "of full", "loss", "95% interval", "")
    xs = sorted({choice.part for choice in made})
    names = list(dict.fromkeys(choice.contender.arm.name for choice in made))
    lines = {
        name: [
            next((100 * c.loss for c in made if c.contender.arm.name == name and c.part == x), None)
            for x in xs
        ]
        for name in names
    }
    curves = Curves(
        "Quality by bytes",
        xs,
        lines,
        "part of the full cache's bytes",
        "perplexity above the full cache's, %",
        logarithmic=True,
    )
    title = f"The smallest cache that loses at most {100 * most:g} %"
    return Section(title, "", [Rows("", columns, rows)], [curves])
