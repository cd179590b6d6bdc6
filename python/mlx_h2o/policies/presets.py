"""Published settings by name."""

from __future__ import annotations

from mlx_h2o.policies.base import register_preset

# The AtomGradient report: 4 sink + 128 recent + 124 heavy of 256 slots, |logit| averages per layer.
register_preset("paper", "ema-logits", sink=4, recent=128, unit="layer", prompt="full")

# Zhang et al. 2023, section 5: half heavy hitters, half recent, no sinks, sums over all queries.
register_preset("h2o-paper", "h2o", sink=0, recent=0.5, prompt="full")
