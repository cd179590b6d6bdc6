"""The settings of the server's engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_h2o._byte_size import Share
from mlx_h2o.compression.reading import Readings
from mlx_h2o.serve.pins import NO_PINS, PinRequest
from mlx_h2o.serve.sessions import Limits


@dataclass(frozen=True)
class EngineSettings:
    """What the scheduler needs to know.

    Attributes:
        models: The names of the models; the first is loaded at the start.
        defaults: The caches' settings for a request that gives none.
        measures: Whether models without a profile are measured when they are loaded.
        pins: The pins of a prompt whose request gives none.
        bound: Bytes of all conversations, prefixes and batches, or a share of a 16-bit cache of
            the first model; None means no bound.
        memory: Bytes of `bound` and of all loaded weights; None: most of the machine's memory if
            there are several models.
        queue: The most answers that may wait.
        chunk: Prompt tokens that are read at once; None: as many as suit the model.
        answer_tokens: The most tokens of an answer whose request gives no number.
        sessions: The folder of saved conversations, or None.
        limits: The bounds of that folder.
        long_prompts: Whether prompts longer than those of training are served.
        reading: How a prompt is read whose request does not say (`compression/reading.py`).
    """

    models: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    measures: bool = False
    pins: PinRequest = NO_PINS
    bound: int | Share | None = None
    memory: int | None = None
    queue: int = 32
    chunk: int | None = None
    answer_tokens: int = 512
    sessions: Path | None = None
    limits: Limits = field(default_factory=Limits)
    long_prompts: bool = False
    reading: Readings = "once"
