"""Frames for packed keys at hand: of a profile, kept from before, or made now and kept."""

from __future__ import annotations

import sys
from typing import Any

import mlx.nn as nn

from mlx_h2o.kept_of_model import KeptOfModel
from mlx_h2o.key_frames import frame_passes, frame_tokens, frames_of_text
from mlx_h2o.measured import LayerFrames, check_frames, frames_of_json, json_of_frames
from mlx_h2o.model_identity import ModelIdentity
from mlx_h2o.profile import Profile
from mlx_h2o.progress import progress_bar

KEPT = KeptOfModel("mlx-h2o frames", ".frames.json", version=2)

Frames = dict[int, LayerFrames]


def found_frames(identity: ModelIdentity, profile: Profile | None) -> Frames | None:
    """Frames that need no computing; None where there are none."""
    if profile is not None and profile.measured and profile.measured.frames:
        return profile.measured.frames

    def read(data: Any) -> Frames:
        frames = frames_of_json(data["frames"])
        check_frames(frames, identity.kv_heads, identity.key_widths)
        return frames

    return KEPT.load(identity, read)


def made_frames(model: nn.Module, identity: ModelIdentity) -> Frames | None:
    """Frames of the bundled texts, kept for the next time; None without the model's tokenizer."""
    tokenizer = getattr(model, "mlx_h2o_tokenizer", None)
    if tokenizer is None:
        return None
    place = KEPT.place_of(identity)
    print(f"Making frames for packed keys (once, kept in {place})", file=sys.stderr)
    passes, layers = frame_passes(model, frame_tokens(tokenizer)), len(identity.kv_heads)
    with progress_bar("making frames") as told:
        frames = frames_of_text(model, passes, progress=lambda done: told(done, layers))
    KEPT.keep(identity, {"frames": json_of_frames(frames)})
    return frames
