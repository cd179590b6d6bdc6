"""The compiled CPU kernels (c_api/src/cpu), as python/src/bindings.cpp binds them."""

import enum
from collections.abc import Sequence

import mlx.core as mx

built_for_mlx: str

class Export(enum.Enum):
    none = ...
    logits = ...
    mass = ...

class Score(enum.Enum):
    none = ...
    sum = ...
    ema = ...
    ema_logits = ...
    last = ...

class Priority(enum.Enum):
    score = ...
    age = ...
    distance = ...
    direction = ...
    salience = ...

class Stored:
    def __init__(self, arrays: list[mx.array], bits: int = 0, group_size: int = 0) -> None: ...

def attention(
    q: mx.array,
    k: Stored,
    v: Stored,
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    seed: tuple[mx.array, mx.array] | None = None,
    ranges: list[tuple[int, int]] | None = None,
    wanted: Export = ...,
    stream: mx.Stream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def pack(
    rows: mx.array,
    bits: int,
    group_size: int,
    stream: mx.Stream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def ranges_fit_mlx() -> bool: ...
def reserved(shapes: Sequence[Sequence[int]], dtypes: Sequence[mx.Dtype]) -> list[mx.array]: ...
def is_elsewhere(array: mx.array) -> bool: ...
def put_rows(
    fields: list[mx.array],
    index: mx.array,
    rows: list[mx.array],
    unused: list[tuple[int, int]] = ...,
    stream: mx.Stream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def reserved_bytes() -> tuple[int, int]: ...

class KernelPolicy:
    def __init__(
        self,
        *,
        score: Score,
        priority: Priority,
        per_layer: bool,
        age_normalised: bool,
        sink: int,
        evict_every: int,
        decay: float,
        distance_weight: float,
        mass_weight: float,
        value_weight: float,
        age_weight: float,
    ) -> None: ...

class Recent:
    def __init__(
        self,
        keys: Stored,
        values: Stored,
        scores: mx.array,
        value_lengths: mx.array | None = None,
    ) -> None: ...

class Frame:
    def __init__(self, centre: mx.array, scale: mx.array) -> None: ...

class DecodingLayer:
    def __init__(
        self,
        keys: Stored,
        values: Stored,
        fields: list[mx.array],
        policy: KernelPolicy,
        *,
        remembers: bool,
        answers: bool,
        saturation: list[float],
        recent: Recent | None = None,
        stream: mx.Stream | mx.Device | None = None,
        frame: Frame | None = None,
        undo: int = 0,
    ) -> None: ...
    def take_back(self, count: int) -> None: ...
    def journal(self) -> list[list[tuple[int, mx.array]]]: ...
    @property
    def journal_bytes(self) -> int: ...
    def close(self, stream: mx.Stream | mx.Device | None = None) -> list[mx.array]: ...

def step(
    layers: list[DecodingLayer],
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    sinks: mx.array | None = None,
    tokens: Sequence[
        Sequence[
            tuple[
                int,
                Sequence[tuple[int, int, int, int, int, bool]],
                tuple[int, int, bool] | None,
                int,
            ]
        ]
    ],
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def tracing() -> bool: ...
def isa() -> str: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def blas_file() -> str: ...
def redirect_blas(library: str, prefix: str) -> int: ...
def restore_blas() -> None: ...
