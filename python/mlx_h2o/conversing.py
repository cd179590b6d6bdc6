"""What a conversation does with its cache between two calls of the model: pins, and turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_h2o.layer import Layer
from mlx_h2o.pinning import PinAnswer, answer_of, repin
from mlx_h2o.pins import Span, checked_spans, joined, without
from mlx_h2o.settings import CacheSettings
from mlx_h2o.turns import checked_carry, new_turn


class Conversing:
    """Pins and turns of one layer's cache."""

    _unopened: CacheSettings
    _layer: Layer | None

    @property
    def pins(self) -> tuple[Span, ...]:
        """Spans of positions whose tokens are never evicted."""
        return (self._layer.settings if self._layer else self._unopened).pins

    def pin(self, spans: Sequence[Span]) -> PinAnswer:
        """Never evict the tokens at some positions, whatever the policy.

        Tokens that are still to come can be pinned, and those that are held. Pins count against the
        budget. A head that is too small for them gets slots of the layer's larger heads. They stay
        with their positions through resizing, trimming, copies and files. Steps before this cannot
        be taken back any more.

        Args:
            spans: Pairs (first position, one past the last).

        Returns:
            Which are pinned, and which were gone already.

        Raises:
            ValueError: They are no spans, or too many for the budget; nothing was changed.
            RuntimeError: The last rows were not attended to yet.
        """
        settings, answer = self.pinned_settings(spans)
        self.pin_as(settings)
        return answer

    def unpin(self, spans: Sequence[Span] | None = None) -> None:
        """Let tokens go as any others; all without `spans`."""
        kept = () if spans is None else without(self.pins, checked_spans("spans", spans))
        self.pin_as(replace(self._layer.settings if self._layer else self._unopened, pins=kept))

    def pinned_settings(self, spans: Sequence[Span]) -> tuple[CacheSettings, PinAnswer]:
        """What `pin` would set and answer; arguments and errors are its own."""
        self.require_at_rest()
        asked = checked_spans("spans", spans)
        if self._layer is None:
            return replace(self._unopened, pins=joined((*self.pins, *asked))), PinAnswer(asked)
        answer = answer_of(self._layer, asked)
        pins = joined((*self.pins, *answer.pinned, *answer.partly))
        return replace(self._layer.settings, pins=pins), answer

    def pin_as(self, settings: CacheSettings) -> None:
        """Have the pins, and the room for them, that other settings of its own have."""
        self.require_at_rest()
        if self._layer is None:
            self._unopened = settings
        else:
            repin(self._layer, settings)

    def new_turn(self, carry: float | str = 1.0) -> None:
        """Say how much of what was attended to before still counts.

        Args:
            carry: 1: all of it, as if nothing had been said. Less: scores speak of the last `carry`
                times as many steps as before. 0 or "reset": of none. `turns.py` says how.

        Raises:
            ValueError: It is none of these.
            RuntimeError: The last rows were not attended to yet.
        """
        part = checked_carry(carry)
        self.require_at_rest()
        if self._layer is not None:
            new_turn(self._layer, part)

    def require_at_rest(self) -> None:
        """Raise RuntimeError unless every row that came was attended to."""
        raise NotImplementedError
