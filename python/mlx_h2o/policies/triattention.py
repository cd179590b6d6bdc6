"""TriAttention: keys are scored against the head's mean query before RoPE, at distances to come."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies import terms
from mlx_h2o.policies.base import Policy, Slots, register_policy

# Beyond it float32 does not tell neighbouring positions apart.
FARTHEST = 2**24


@register_policy("triattention")
@dataclass(frozen=True)
class TriAttention(Policy):
    """Keeps the keys that future queries would attend to, if they were their head's mean query.

        mean over n of sum_f |E q_f| |k_f| cos(w_f (distance + n) + phi_f)
            + sum_f (E |q_f| - |E q_f|) |k_f|

    over rotary pairs f of channels, before RoPE, with n = 1, 2, 4, ... up to `horizon`. Source: Mao
    et al. 2026, arXiv 2604.04921, section 4: queries before RoPE lie around a fixed centre E q, so
    the logit of a key is a trigonometric series in its distance; where a pair's queries scatter,
    the key's length alone counts, as much as they do. The query heads of a KV head are standardised
    over the slots that may go, and a slot is worth the most that any of them gives it.

    The centres are data of a model, of a text that it read once (`calibration/centres_build.py`);
    attention is never looked at. A mean over turned centres is one query, so a choice costs as much
    as one token's logits. Channels without RoPE count in the first term alone, which is then the
    whole logit. The paper chooses anew after each 128 tokens and never lets go of a prompt; here
    prompts are cut down like everything else.

    Attributes:
        horizon: The farthest step ahead that is asked about.
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
        """How far ahead queries are asked about."""
        return [2**i for i in range(self.horizon.bit_length())]

    def priority(self, slots: Slots) -> mx.array:
        centres = slots.centres
        assert centres is not None  # settings without them are refused
        keys = slots.keys.astype(mx.float32)
        logits = centres.ahead(self.steps, slots.offset - 1) @ keys.swapaxes(-1, -2)
        lengths = centres.rope.pair_lengths(keys)
        worth = logits + centres.spread @ lengths.swapaxes(-1, -2)
        return terms.standardised(worth, slots.evictable[:, :, None]).max(axis=2)
