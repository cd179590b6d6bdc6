"""TriAttention: keys are scored against the head's mean query before RoPE, for later positions."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies import terms
from mlx_h2o.policies.base import Policy, Slots, register_policy

# From there on float32 does not distinguish neighbouring positions.
FARTHEST = 2**24


@register_policy("triattention")
@dataclass(frozen=True)
class TriAttention(Policy):
    """Keeps the keys that later queries would attend to if they were their head's mean query.

        mean over n of sum_f |E q_f| |k_f| cos(w_f (distance + n) + phi_f)
            + sum_f (E |q_f| - |E q_f|) |k_f|

    over rotary pairs f of channels, before RoPE, with n = 1, 2, 4, ... up to `horizon`. Source: Mao
    et al. 2026, arXiv 2604.04921, section 4: queries before RoPE lie around a fixed centre E q, so
    the logit of a key is a trigonometric series in its distance. Where a pair's queries scatter,
    the key's length counts too, weighted by the scatter. The query heads of a KV head are
    standardised over the slots that may be evicted, and a slot's worth is the maximum over these
    query heads.

    The centres are constants of a model, from a text that it read once
    (`calibration/centres_build.py`); the policy never uses attention. A mean over turned centres is
    one query, so a choice costs as much as one token's logits. Channels without RoPE count in the
    first term alone, which is then their whole logit. The paper chooses anew after each 128 tokens
    and never evicts prompt tokens; here prompts are reduced as by every policy.

    Attributes:
        horizon: The farthest step ahead that is scored.
    """

    recent: int | float = 0.25
    evict_every: int = 16
    prompt: str = "full"
    horizon: int = 65536

    ranks_scores = False
    uses_query_centres = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.horizon <= FARTHEST:
            raise ValueError(f"horizon must be from 1 to {FARTHEST}; got {self.horizon}.")

    @property
    def needs_attention(self) -> bool:
        return False

    @property
    def steps(self) -> list[int]:
        """The distances ahead at which keys are scored."""
        return [2**i for i in range(self.horizon.bit_length())]

    def priority(self, slots: Slots) -> mx.array:
        centres = slots.centres
        assert centres is not None  # settings without them are refused
        keys = slots.keys.astype(mx.float32)
        logits = centres.ahead(self.steps, slots.offset - 1) @ keys.swapaxes(-1, -2)
        lengths = centres.rope.pair_lengths(keys)
        worth = logits + centres.spread @ lengths.swapaxes(-1, -2)
        return terms.standardised(worth, slots.evictable[:, :, None]).max(axis=2)
