"""Frames for packed keys at hand: of a profile, kept from before, or made now and kept."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import profile_places
from mlx_h2o.files import replacing
from mlx_h2o.key_frames import FRAME_LENGTH, frame_tokens, frames_of_text
from mlx_h2o.measured import LayerFrames, check_frames, frames_of_json, json_of_frames
from mlx_h2o.model_identity import ModelIdentity
from mlx_h2o.profile import Profile
from mlx_h2o.watching import trained_context, windows_of

FORMAT, VERSION = "mlx-h2o frames", 1
SUFFIX = ".frames.json"

Frames = dict[int, LayerFrames]


def found_frames(identity: ModelIdentity, profile: Profile | None) -> Frames | None:
    """Frames that need no computing; None where there are none."""
    if profile is not None and profile.measured and profile.measured.frames:
        return profile.measured.frames
    path = place_of(identity)
    return load_frames(path, identity) if path.exists() else None


def made_frames(model: nn.Module, identity: ModelIdentity) -> Frames | None:
    """Frames of the bundled texts, kept for the next time; None without the model's tokenizer."""
    tokenizer = getattr(model, "mlx_h2o_tokenizer", None)
    if tokenizer is None:
        return None
    path = place_of(identity)
    print(f"Making frames for packed keys (once, kept in {path})", file=sys.stderr)
    length = min(FRAME_LENGTH, trained_context(model))
    frames = frames_of_text(model, mx.concatenate(windows_of(frame_tokens(tokenizer), length)))
    try:
        save_frames(path, identity, frames)
    except OSError as error:
        print(f"They could not be kept: {error}", file=sys.stderr)
    return frames


def place_of(identity: ModelIdentity) -> Path:
    """Of a model's frames among this user's."""
    return profile_places.kept_folder() / f"{identity.file_stem}{SUFFIX}"


def save_frames(path: Path, identity: ModelIdentity, frames: Frames) -> None:
    """Write frames as JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "model": asdict(identity)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**head, "frames": json_of_frames(frames)}))


def load_frames(path: Path, identity: ModelIdentity) -> Frames | None:
    """What `save_frames` wrote of this model; None where it is anything else, to be made anew."""
    try:
        data = json.loads(path.read_text())
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            return None
        if ModelIdentity.of_json(data["model"]).difference(identity) is not None:
            return None
        frames = frames_of_json(data["frames"])
        check_frames(frames, identity.kv_heads, identity.key_widths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return frames
