"""A slow, independent bounded cache in float64, which the real one is held against.

Written from docs/how-it-works/index.md and the policies' docstrings, not from cache.py: it keeps
every row that ever came, per KV head only a set of positions that are still held, recomputes
attention over them token by token and the remainder from the list of all evicted rows, and sorts
plain Python lists to choose. Nothing here is incremental, vectorised over heads, or in place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mlx_h2o import Policy

# The remainder's t ("Remainder" in docs/how-it-works/index.md).
SATURATION = 4.0
# docs/reference/policies.md, `distinct`: fewer evicted keys have no mean worth measuring from.
FEWEST_FOR_A_MEAN = 16
# What a mean mass of nothing counts as in a logarithm (policies/base.py).
MASS_FLOOR = 1e-6
# Priorities closer than this may be ranked either way in float32: absolute where they are
# standardised or cosines, relative where they are attention masses, which may all be small.
NEAR_TIE = 1e-4

#: Policies whose score is the summed attention mass, and those that gather no score.
SUMMED = ("h2o", "distinct", "salient")
KEYS_ONLY = ("keydiff", "streaming")
#: Those whose score is an average that forgets.
FORGETFUL = ("ema", "ema-logits", "snapkv")
#: Those that rank by sums of z-scores, or by cosines.
STANDARDISED = ("distinct", "salient", "keydiff")


@dataclass
class Witness:
    """What the cache under test did in a call, so that the oracle may follow a near-tie.

    Attributes:
        kept: Positions that each KV head holds, `[batch][head]`.
        victims: Positions that it will overwrite next, in order, `[batch][head]`.
    """

    kept: list[list[set[int]]]
    victims: list[list[list[int]]]


@dataclass
class Head:
    """One KV head of one sequence: every row it ever saw, and which of them it still holds.

    Attributes:
        budget: Slots.
        keys: Every key that came, by position.
        values: Every value that came, by position.
        kept: Positions still held, ascending.
        scores: The policy's score of each kept position.
        victims: Positions that the next rows will push out, in order.
    """

    budget: int
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    victims: list[int] = field(default_factory=list)

    @property
    def evicted(self) -> list[int]:
        return [p for p in range(len(self.keys)) if p not in self.scores]

    def drop(self, position: int) -> None:
        self.kept.remove(position)
        del self.scores[position]


@dataclass
class Statistics:
    """The remainder of one head."""

    count: int
    mean_key: np.ndarray
    var_key: np.ndarray
    mean_value: np.ndarray


def statistics(head: Head) -> Statistics:
    """The remainder anew from all rows that the head has lost."""
    keys = np.array([head.keys[p] for p in head.evicted])
    values = np.array([head.values[p] for p in head.evicted])
    return Statistics(len(keys), keys.mean(axis=0), keys.var(axis=0), values.mean(axis=0))


@dataclass
class Seen:
    """What one query did to one KV head: per query head, by position.

    Attributes:
        logits: `[G]` of position -> logit, visible positions only.
        weights: `[G]` of position -> softmax weight.
    """

    logits: list[dict[int, float]]
    weights: list[dict[int, float]]

    def mass(self, position: int) -> float:
        return float(np.mean([of_head.get(position, 0.0) for of_head in self.weights]))

    def size_of_logit(self, position: int) -> float:
        return float(np.mean([abs(of_head.get(position, 0.0)) for of_head in self.logits]))


class Oracle:
    """A bounded cache of one layer.

    Args:
        policy: Whose name and hyper-parameters to follow; none of its methods is called.
        budgets: Slots of each KV head.
        remainder: Whether evicted tokens go on answering.
        batch: Sequences, which share nothing.
    """

    def __init__(self, policy: Policy, budgets: list[int], remainder: bool, batch: int = 1):
        self.policy = policy
        self.remainder = remainder
        self.offset = 0
        self.heads = [list(map(Head, budgets)) for _ in range(batch)]
        #: How often a choice was only followed, being within NEAR_TIE of the oracle's own.
        self.near_ties = 0

    @property
    def looks(self) -> bool:
        """Whether the policy scores by attention."""
        if self.policy.name == "distinct":
            return self.policy.mass_weight != 0
        return self.policy.name not in KEYS_ONLY

    def step(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float,
        witness: Witness,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        """One call of the attention: L new tokens, causal.

        Args:
            q: `[B, Hq, L, D]`.
            k: `[B, Hk, L, D]`.
            v: `[B, Hk, L, Dv]`.
            scale: Factor on q.k.
            witness: What the cache chose in this call.
            sinks: Attention-sink logits `[Hq]`.

        Returns:
            `[B, Hq, L, Dv]`, float64.
        """
        q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
        B, Hq, L, _ = q.shape
        group = Hq // k.shape[1]
        out = np.zeros((B, Hq, L, v.shape[-1]))
        started = self.offset
        self.offset += L
        for b, heads in enumerate(self.heads):
            window_masses = []
            for h, head in enumerate(heads):
                self._enter(head, k[b, h], v[b, h], started)
                of_head = slice(h * group, (h + 1) * group)
                extra = None if sinks is None else np.asarray(sinks, np.float64)[of_head]
                remainder = statistics(head) if self.remainder and head.evicted else None
                seen = []
                for i in range(L):
                    rows, what = self._attend(
                        head, q[b, of_head, i], started + i, scale, remainder, extra
                    )
                    out[b, of_head, i] = rows
                    seen.append(what)
                window_masses.append(self._score(head, seen, started))
            self._reduce(heads, window_masses, witness.kept[b])
            self._choose(heads, witness.victims[b])
        return out

    # -- rows come and are attended to -------------------------------------------------------------

    def _enter(self, head: Head, keys: np.ndarray, values: np.ndarray, started: int) -> None:
        """Take new rows in. One alone pushes a victim out of a full head; a chunk waits."""
        if len(keys) == 1 and len(head.kept) == head.budget:
            head.drop(head.victims.pop(0))
        head.keys += list(keys)
        head.values += list(values)
        for position in range(started, started + len(keys)):
            head.kept.append(position)
            head.scores[position] = 0.0

    def _attend(
        self,
        head: Head,
        q: np.ndarray,
        position: int,
        scale: float,
        remainder: Statistics | None,
        sinks: np.ndarray | None,
    ) -> tuple[np.ndarray, Seen]:
        """One token's queries `[G, D]` over what is kept, the remainder and the attention sinks."""
        visible = [p for p in head.kept if p <= position]
        outs, logits, weights = [], [], []
        for g, query in enumerate(q):
            columns = [scale * float(query @ head.keys[p]) for p in visible]
            answers = [head.values[p] for p in visible]
            if remainder is not None:
                x = 0.5 * scale**2 * float((query**2 * remainder.var_key).sum())
                columns.append(
                    math.log(remainder.count)
                    + scale * float(query @ remainder.mean_key)
                    + x / math.sqrt(1 + x / SATURATION)
                )
                answers.append(remainder.mean_value)
            if sinks is not None:
                columns.append(float(sinks[g]))
                answers.append(np.zeros_like(answers[0]))
            shares = np.exp(np.array(columns) - max(columns))
            shares /= shares.sum()
            outs.append(shares @ np.array(answers))
            logits.append(dict(zip(visible, columns, strict=False)))
            weights.append(dict(zip(visible, shares.tolist(), strict=False)))
        return np.array(outs), Seen(logits, weights)

    # -- scores ------------------------------------------------------------------------------------

    def _score(self, head: Head, seen: list[Seen], started: int) -> dict[int, float] | None:
        """Bring the scores up to date; the prompt window's mass by position, if there is one."""
        if not self.looks:
            return None
        policy, L = self.policy, len(seen)
        before = dict(head.scores)
        windowed = L > 1 and policy.prompt == "window"
        first = max(0, L - policy.window) if windowed else 0
        looked = range(first, L)
        for p in head.kept:
            if policy.name in SUMMED:
                # A window speaks for all queries of the chunk that saw the slot.
                saw = sum(1 for i in range(L) if started + i >= p)
                saw_and_looked = sum(1 for i in looked if started + i >= p)
                mass = sum(seen[i].mass(p) for i in looked)
                head.scores[p] += mass * saw / saw_and_looked
            elif policy.name in FORGETFUL:
                decay = 1 - 1 / policy.window if policy.name == "snapkv" else policy.decay
                for i in looked:
                    logits = policy.name == "ema-logits"
                    evidence = seen[i].size_of_logit(p) if logits else seen[i].mass(p)
                    head.scores[p] = decay * head.scores[p] + (1 - decay) * evidence
            else:
                assert policy.name == "tova"
                head.scores[p] = seen[-1].mass(p)
        if not windowed:
            return None
        # Queries of the window that lie before this chunk: the mean mass per step stands in.
        missing = max(0, policy.window - L)
        window_mass = {}
        for p in head.kept:
            per_step = before[p]
            if policy.name in SUMMED:
                per_step /= max(started - p, 1)
            window_mass[p] = sum(seen[i].mass(p) for i in looked) + missing * per_step
        return window_mass

    # -- priorities --------------------------------------------------------------------------------

    def _evictable(self, head: Head) -> list[int]:
        recent = self.policy.recent
        if isinstance(recent, float):
            recent = int(recent * head.budget)
        return [p for p in head.kept if self.policy.sink <= p < self.offset - recent]

    def _age(self, position: int) -> int:
        return self.offset - position

    def _priority(self, head: Head) -> dict[int, float]:
        """What each kept position is worth after a decode step."""
        policy, may_go = self.policy, self._evictable(head)
        if policy.name == "streaming":
            return {p: float(p) for p in head.kept}
        if policy.name == "keydiff":
            directions = {p: head.keys[p] / np.linalg.norm(head.keys[p]) for p in head.kept}
            anchor = np.mean(list(directions.values()), axis=0)
            anchor /= np.linalg.norm(anchor)
            return {p: 1 - float(directions[p] @ anchor) for p in head.kept}
        if policy.name == "distinct":
            evicted = head.evicted
            among = evicted if len(evicted) >= FEWEST_FOR_A_MEAN else head.kept
            mean = np.mean([head.keys[p] for p in among], axis=0)
            worth = distances(head, mean, may_go)
            if policy.mass_weight:
                steps = {p: head.scores[p] / self._age(p) for p in head.kept}
                used = standardised({p: math.log(s + MASS_FLOOR) for p, s in steps.items()}, may_go)
                worth = {p: worth[p] + policy.mass_weight * used[p] for p in head.kept}
            old = standardised({p: math.log(self._age(p)) for p in head.kept}, may_go)
            return {p: worth[p] - policy.age_weight * old[p] for p in head.kept}
        if policy.name == "salient":
            return self._salience(head, {p: head.scores[p] / self._age(p) for p in head.kept})
        return self._weighed(head, dict(head.scores))

    def _weighed(self, head: Head, worth: dict[int, float]) -> dict[int, float]:
        """With the options age_normalised and value_weighted."""
        policy = self.policy
        if policy.age_normalised:
            worth = {p: c / self._age(p) for p, c in worth.items()}
        if policy.value_weighted:
            worth = {p: c * float(np.linalg.norm(head.values[p])) for p, c in worth.items()}
        return worth

    def _salience(self, head: Head, rates: dict[int, float]) -> dict[int, float]:
        """`salient`, for these masses per step."""
        policy, evicted, may_go = self.policy, head.evicted, self._evictable(head)
        among = evicted if len(evicted) >= FEWEST_FOR_A_MEAN else head.kept
        mean = np.mean([head.keys[p] for p in among], axis=0)
        # Lengths are kept as half precision.
        lengths = {p: float(np.float16(np.log((head.values[p] ** 2).sum()))) for p in head.kept}
        used = standardised({p: math.log(r + MASS_FLOOR) for p, r in rates.items()}, may_go)
        apart, long = distances(head, mean, may_go), standardised(lengths, may_go)
        old = standardised({p: math.log(self._age(p)) for p in head.kept}, may_go)
        return {
            p: used[p]
            + policy.distance_weight * apart[p]
            + policy.value_weight * long[p]
            - policy.age_weight * old[p]
            for p in head.kept
        }

    def _prompt_priority(
        self, head: Head, window_mass: dict[int, float] | None
    ) -> dict[int, float]:
        """What each position is worth when a prompt chunk is reduced."""
        policy, may_go = self.policy, self._evictable(head)
        if policy.name == "distinct":
            mean = np.mean([head.keys[p] for p in [*head.evicted, *may_go]], axis=0)
            worth = distances(head, mean, may_go)
            if policy.mass_weight:
                mass = window_mass or {p: head.scores[p] / self._age(p) for p in head.kept}
                used = standardised({p: math.log(m + MASS_FLOOR) for p, m in mass.items()}, may_go)
                worth = {p: worth[p] + policy.mass_weight * used[p] for p in head.kept}
            return worth
        if window_mass is None:
            return self._priority(head)
        if policy.name == "salient":
            return self._salience(head, window_mass)
        half = policy.pool // 2
        worth = {}
        for i, p in enumerate(head.kept):
            neighbours = head.kept[max(0, i - half) : i + half + 1]
            # Zeros stand beyond both ends, so the mean is always over `pool`.
            if policy.name == "snapkv":
                worth[p] = max(window_mass[near] for near in neighbours)
            else:
                worth[p] = sum(window_mass[near] for near in neighbours) / policy.pool
            if policy.value_weighted:
                worth[p] *= float(np.linalg.norm(head.values[p]))
        return worth

    def _near(self, a: float, b: float) -> bool:
        scale = 1 if self.policy.name in STANDARDISED else max(abs(a), abs(b))
        return abs(a - b) < NEAR_TIE * scale

    # -- choices -----------------------------------------------------------------------------------

    def _ranked(
        self, heads: list[Head], worth_of: Callable[[int, Head], dict[int, float]]
    ) -> list[dict[int, float]]:
        """Priorities per head; their mean over all heads where the layer chooses together."""
        worths = [worth_of(h, head) for h, head in enumerate(heads)]
        if self.policy.unit == "layer":
            mean = {p: float(np.mean([worth[p] for worth in worths])) for p in worths[0]}
            return [mean] * len(heads)
        return worths

    def _worst(self, head: Head, worth: dict[int, float], count: int) -> list[int]:
        """The `count` evictable positions of least worth, worst first, ties oldest first."""
        may_go = self._evictable(head)
        assert len(may_go) >= count, "the budget leaves too little to evict"
        return sorted(may_go, key=lambda p: (worth[p], p))[:count]

    def _reduce(
        self, heads: list[Head], masses: list[dict[int, float] | None], kept: list[set[int]]
    ) -> None:
        """After a prompt chunk: every head over its budget drops its least worthy."""
        over = [h for h, head in enumerate(heads) if len(head.kept) > head.budget]
        if not over:
            return
        full = [heads[h] for h in over]
        worths = self._ranked(full, lambda i, head: self._prompt_priority(head, masses[over[i]]))
        choices = []
        for h, head, worth in zip(over, full, worths, strict=True):
            ours = self._worst(head, worth, len(head.kept) - head.budget)
            theirs = sorted(set(head.kept) - kept[h], key=lambda p: (worth[p], p))
            choices.append(self._followed(head, worth, ours, theirs))
        # Only now: a layer's heads decide by the state in which all of them were.
        for head, dropped in zip(full, choices, strict=True):
            head.victims = []
            for position in dropped:
                head.drop(position)

    def _choose(self, heads: list[Head], theirs: list[list[int]]) -> None:
        """Every full head without victims chooses its next `evict_every`."""
        choosing = [
            h for h, head in enumerate(heads) if len(head.kept) == head.budget and not head.victims
        ]
        if not choosing:
            return
        some = [heads[h] for h in choosing]
        worths = self._ranked(some, lambda _, head: self._priority(head))
        for h, head, worth in zip(choosing, some, worths, strict=True):
            ours = self._worst(head, worth, self.policy.evict_every)
            head.victims = self._followed(head, worth, ours, theirs[h])

    def _followed(
        self, head: Head, worth: dict[int, float], ours: list[int], theirs: list[int]
    ) -> list[int]:
        """Our choice, or the cache's where float32 cannot tell the two apart."""
        if ours == theirs:
            return ours
        assert len(ours) == len(theirs) == len(set(theirs)), f"chose {theirs}, should be {ours}"
        assert set(theirs) <= set(self._evictable(head)), f"{theirs} holds a protected position"
        for mine, other in zip(ours, theirs, strict=True):
            assert self._near(worth[mine], worth[other]), (
                f"at offset {self.offset} the cache chose {theirs}, the oracle {ours}; "
                f"{other} is worth {worth[other]}, {mine} only {worth[mine]}"
            )
        self.near_ties += 1
        return theirs


def standardised(x: dict[int, float], among: list[int]) -> dict[int, float]:
    """z-scores by the mean and deviation among the given positions."""
    values = [x[p] for p in among]
    mean, deviation = float(np.mean(values)), float(np.std(values))
    return {p: (value - mean) / (deviation + 1e-6) for p, value in x.items()}


def distances(head: Head, mean: np.ndarray, may_go: list[int]) -> dict[int, float]:
    """Standardised log ||k - mean||^2 of each kept position."""
    squares = {p: float(((head.keys[p] - mean) ** 2).sum()) for p in head.kept}
    return standardised({p: math.log(square) for p, square in squares.items()}, may_go)
