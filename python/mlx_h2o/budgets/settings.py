"""The settings of bounded caches, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlx_h2o import _checks
from mlx_h2o._byte_size import Share, memory_size
from mlx_h2o.budgets.allocation import room_for_pins
from mlx_h2o.budgets.growth import Stage, checked_filling, due
from mlx_h2o.budgets.options import NAMES, CacheOptions, LayerBudgets
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.tensor_parallel import checked_ranks
from mlx_h2o.policies import KernelPolicy, Policy, make_policy
from mlx_h2o.policies.base import kernel_policy_of
from mlx_h2o.policies.distinct import KEYS_ONLY
from mlx_h2o.slots.journal import MOST_STEPS
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import BITS, DEFAULT_GROUP_SIZE, UNPACKED, Packing
from mlx_h2o.slots.pins import Span, checked_spans
from mlx_h2o.slots.remainder import SATURATION, checked_saturation, plain_rows_for, saturations
from mlx_h2o.spill.setting import Spill, spill_setting

if TYPE_CHECKING:
    from mlx_h2o.slots.rope import Rope

DEFAULT_POLICY = "salient"
POSITIONS = ("absolute", "rolling")
#: Whether a model without a profile is measured at first use, or never.
PROFILES = ("first use", "never")
# The default policy in models that compute attention themselves, in its form by keys alone.
DEFAULT_UNSEEN = "distinct"


@dataclass(frozen=True)
class CacheSettings:
    """The bounds of a layer's cache, and how it stores rows and evicts.

    Attributes:
        max_size: Slots per KV head, or None where max_bytes or budgets is given.
        max_bytes: Bytes that the layer's cache may take.
        budgets: Slots of each KV head.
        policy: The eviction policy; a name is converted to a policy.
        remainder: Whether evicted tokens keep contributing through the remainder.
        packing: How rows are stored.
        attending: Whether this library computes the attention.
        undo: How many of the last tokens can be taken back after evictions.
        saturation: t of the remainder's term (`Remainder.column`), for all KV heads or for each; 0
            is first order.
        frame: The key scaling (`Frame`) of packed keys, or None.
        filling: Budgets that follow as the conversation grows (`budgets/growth.py`); `budgets` are
            those of a shorter one.
        rope: The keys' RoPE, if queries see them at positions without gaps (`slots/rope.py`).
        ranks: Processes that share the layer's KV heads (`budgets/tensor_parallel.py`).
        pins: Spans of positions that are never evicted (`slots/pins.py`). A head that is too
            small for them, and for what its policy protects beside them, gets slots of the layer's
            larger heads, so that a profile's smallest heads hold every pin and bytes stay as they
            were.

    Raises:
        ValueError: A setting is invalid, or two exclude each other; the message names it.
    """

    max_size: int | None = None
    max_bytes: int | None = None
    budgets: tuple[int, ...] | None = None
    policy: Policy = field(default_factory=lambda: make_policy(DEFAULT_POLICY))
    remainder: bool = True
    packing: Packing = field(default_factory=Packing)
    attending: bool = True
    undo: int = 0
    saturation: float | tuple[float, ...] = SATURATION
    frame: Frame | None = None
    filling: tuple[Stage, ...] = ()
    rope: Rope | None = None
    ranks: int = 1
    pins: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        self._set("policy", make_policy(self.policy))
        self._set("remainder", _checks.switch("remainder", self.remainder))
        self._set("attending", _checks.switch("attending", self.attending))
        one_size(max_size=self.max_size, max_bytes=self.max_bytes, budgets=self.budgets)
        if self.max_bytes is not None:
            size = _checks.whole("max_bytes", self.max_bytes, 1, _checks.MOST_BYTES)
            self._set("max_bytes", size)
        if not self.attending and self.policy.needs_attention:
            raise ValueError(
                f"Policy {self.policy.name!r} must see attention, which this model computes by "
                'itself (attending=False): choose one that uses keys alone ("keydiff", '
                '"streaming", or "distinct" with mass_weight=0).'
            )
        if self.packing.packs and not self.attending:
            raise ValueError("A model that attends by itself cannot read packed keys and values.")
        self._set("undo", checked_undo(self.undo))
        if self.undo and not self.attending:
            raise ValueError("A model that attends by itself cannot take tokens back one by one.")
        if self.max_size is not None:
            size = _checks.whole("max_size", self.max_size)
            self._set("max_size", self.checked_budgets("max_size", size)[0])
        if self.budgets is not None:
            self._set("budgets", self.checked_budgets("budgets", self.budgets))
        self._set("saturation", checked_saturation("saturation", self.saturation))
        if not self.attending and self.saturation != SATURATION:
            raise ValueError(
                "A model that attends by itself has the remainder as plain rows, which saturate of "
                "themselves: omit saturation."
            )
        if self.budgets is not None:
            self.saturations(len(self.budgets))
        if self.frame is not None:
            self._check_frame(self.frame)
        if self.rope is not None:
            check_rolling(self.attending, self.remainder, self.packing)
        self._set("ranks", checked_ranks(self.ranks))
        self._set("filling", checked_filling(self.filling))
        for stage in self.filling:
            self.checked_budgets("budgets", stage.budgets)
            if len(stage.budgets) != len(self.budgets or ()):
                raise ValueError("filling needs budgets of as many heads.")
        self._set("pins", checked_spans("pins", self.pins))
        if self.pins:
            self._make_room()

    def _make_room(self) -> None:
        """Make room in every head for the pins, now and at every stage to come."""
        if self.max_size is not None:
            room_for_pins((self.max_size,), self.policy, self.pins)
        if self.budgets is not None:
            plain = 0
            if self.remainder and not self.attending:
                plain = plain_rows_for(min(self.budgets))
            slots = [budget - plain for budget in self.budgets]
            roomy = room_for_pins(slots, self.policy, self.pins)
            self._set("budgets", tuple(count + plain for count in roomy))
        later = [Stage(b, room_for_pins(s, self.policy, self.pins)) for b, s in self.filling]
        self._set("filling", tuple(later))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_frame(self, frame: Any) -> None:
        if not isinstance(frame, Frame):
            raise ValueError(f"frame must be a Frame or None; got {type(frame).__name__}.")
        if self.packing.k_bits is None:
            raise ValueError("frame is for packed keys: it needs bits or k_bits.")

    def check_rows(self, heads: int, width: int) -> None:
        """Raise ValueError unless keys of so many KV heads and this width fit the settings."""
        self.saturations(heads)
        if self.rope is not None and self.rope.dims > width:
            raise ValueError(
                f"The rope turns {self.rope.dims} channels, and this layer's keys have {width}."
            )
        if self.frame is not None and self.frame.centre.shape != (heads, width):
            raise ValueError(
                f"frame is for (KV heads, key width) {self.frame.centre.shape}; this layer has "
                f"{(heads, width)}."
            )

    @property
    def size(self) -> str:
        """For messages: "16 to 32 slots", "64 slots" or "at most 90,000 bytes"."""
        if self.budgets is not None:
            few, most = min(self.budgets), max(self.budgets)
            return f"{few} to {most} slots" if few < most else f"{most} slots"
        if self.max_size is not None:
            return f"{self.max_size} slots"
        return f"at most {self.max_bytes:,} bytes"

    def config(self) -> dict[str, Any]:
        """The settings as JSON types; `saved_state.settings_of` reads them."""
        return {
            "policy": {"name": self.policy.name, **asdict(self.policy)},
            "remainder": self.remainder,
            "attending": self.attending,
            "packing": asdict(self.packing),
            "undo": self.undo,
            "saturation": self._saturation_config(),
            "filling": [list(stage) for stage in self.filling],
            **({"rope": self.rope.config()} if self.rope else {}),
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            "pins": [list(span) for span in self.pins],
            "max_size": self.max_size,
            "max_bytes": self.max_bytes,
            "budgets": None if self.budgets is None else list(self.budgets),
        }

    def _saturation_config(self) -> float | list[float]:
        """One number if all heads have the same."""
        if isinstance(self.saturation, float):
            return self.saturation
        return list(self.saturation) if len(set(self.saturation)) > 1 else self.saturation[0]

    def saturations(self, heads: int) -> tuple[float, ...]:
        """The remainder's t of each of `heads` KV heads.

        Raises:
            ValueError: Their number is not `heads`.
        """
        if isinstance(self.saturation, float):  # checked when these settings were made
            return (self.saturation,) * heads
        return saturations("saturation", self.saturation, heads)

    @cached_property
    def kernel_policy(self) -> KernelPolicy | None:
        """The policy for the CPU kernels; used at every step."""
        return kernel_policy_of(self.policy)

    @cached_property
    def gpu_form(self) -> tuple[Any, ...] | None:
        """The settings that decide which GPU kernel text a step compiles; None if there is none."""
        kernel = kernel_policy_of(self.policy, weigh_values=True)
        if kernel is None:
            return None
        forms = kernel.score, kernel.priority, kernel.per_layer, kernel.age_normalised
        weighs = self.policy.value_weighted
        return *forms, weighs, self.packing, self.frame is not None, self.remembers, self.remainder

    @cached_property
    def remembers(self) -> bool:
        """Whether statistics of evicted tokens are kept at all."""
        return self.remainder or self.policy.uses_evicted_mean

    def resized(self, budgets: Sequence[int], alike: bool = False) -> CacheSettings:
        """The same settings with each head's slots; with `alike` the first number is for all."""
        if alike:
            return replace(self, max_size=budgets[0], max_bytes=None, budgets=None, filling=())
        slots = tuple(budgets)
        return replace(self, max_size=None, max_bytes=None, budgets=slots, filling=())

    def grown(self, tokens: int) -> CacheSettings | None:
        """The settings for a conversation of so many tokens; None if they are the same."""
        count = due(self.filling, tokens)
        if not count:
            return None
        budgets, later = self.filling[count - 1].budgets, self.filling[count:]
        return replace(self, budgets=budgets, filling=later)

    def checked_budgets(self, name: str, budgets: Any) -> tuple[int, ...]:
        """Slots of some KV heads; one number stands for all of them.

        Args:
            name: The caller's name for them, used in messages.
            budgets: A number, or a list with each head's.

        Raises:
            ValueError: They are not whole numbers, or the policy cannot work with them.
        """
        if name == "budgets" or _checks.is_list(budgets):
            counts = _checks.wholes(name, budgets)
        else:
            counts = (_checks.whole(name, budgets),)
        for count in counts:
            self.policy.check_budget(count, name)
        if len(set(counts)) > 1 and not self.attending:
            raise ValueError("A model that attends by itself needs one budget for all heads.")
        if len(set(counts)) > 1 and self.policy.unit == "layer":
            raise ValueError('unit="layer" needs one budget for all heads: pass budgets="uniform".')
        return counts


@dataclass(frozen=True)
class ModelSettings:
    """The bounds of a whole model's caches, and how they store rows, before the model is known.

    Most fields are options, which `CacheOptions` explains; here are their defaults.

    Attributes:
        max_size: Tokens' worth of memory per KV head and layer, on average, or None.
        packing: How rows are stored, by the options `bits` to `recent_bits`.
        measures: The option `profile`.
        chooses_bits: Whether the size is in bytes and no option says how rows are stored.

    Raises:
        ValueError: A setting is invalid, or two exclude each other; the message names it.
    """

    max_size: int | None = None
    max_bytes: int | str | Share | None = None
    policy: str | Policy | None = None
    remainder: bool = True
    budgets: str | Path | Profile | LayerBudgets | None = None
    packing: Packing = field(default_factory=Packing)
    undo: int = 0
    frames: Sequence[Frame | None] | str | bool | None = None
    context: int | None = None
    chooses_bits: bool = False
    positions: str = "absolute"
    pins: tuple[Span, ...] = ()
    measures: str = PROFILES[0]
    spill: Spill | None = None

    def __post_init__(self) -> None:
        _checks.choice("profile", self.measures, PROFILES)
        object.__setattr__(self, "spill", spill_setting(self.spill))
        object.__setattr__(self, "budgets", budgets_of_model(self.budgets))
        if self.layer_budgets is None:
            one_size(max_size=self.max_size, max_bytes=self.max_bytes)
        elif self.max_size is not None or self.max_bytes is not None:
            raise ValueError("budgets gives the slots of every layer: omit max_size and max_bytes.")
        object.__setattr__(self, "undo", checked_undo(self.undo))
        for name in ("max_size", "context"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checks.whole(name, getattr(self, name), 1))
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", memory_size("max_bytes", self.max_bytes))
        object.__setattr__(self, "remainder", _checks.switch("remainder", self.remainder))
        self.policy_for(attending=True)
        _checks.choice("positions", self.positions, POSITIONS)
        if self.rolls:
            check_rolling(True, self.remainder, self.packing)
        object.__setattr__(self, "frames", frames_or_none(self.frames))
        object.__setattr__(self, "pins", checked_spans("pins", self.pins))
        if isinstance(self.frames, tuple) and self.packing.k_bits is None:
            raise ValueError("frames are for packed keys: they need bits or k_bits.")

    @classmethod
    def of(cls, max_size: int | None = None, **options: Unpack[CacheOptions]) -> ModelSettings:
        """The settings from the options that users give.

        Args:
            max_size: Tokens' worth of memory per KV head and layer, on average.
            options: See `CacheOptions`.

        Raises:
            ValueError: An option is unknown or invalid, or two exclude each other.
        """
        _check_names(options, options.get("policy"))
        values: dict[str, Any] = {name: options[name] for name in NAMES if name in options}  # type: ignore[literal-required]
        stored = {name: values.pop(name) for name in OF_PACKING if name in values}
        packing = packing_of(**stored)
        if not packing.packs and stored.get("group_size", DEFAULT_GROUP_SIZE) != DEFAULT_GROUP_SIZE:
            raise ValueError("group_size needs bits (or k_bits or v_bits): nothing is packed.")
        says_form = any(value is not None for name, value in stored.items() if "bits" in name)
        if values.get("positions") == "rolling":
            says_form = True
            values.setdefault("remainder", False)  # a remainder that is only the default
        chooses_bits = values.get("max_bytes") is not None and not says_form
        measures = values.pop("profile", PROFILES[0])
        return cls(
            max_size, packing=packing, measures=measures, chooses_bits=chooses_bits, **values
        )

    @property
    def rolls(self) -> bool:
        """Whether queries see kept keys at positions without gaps."""
        return self.positions == "rolling"

    @property
    def layer_budgets(self) -> LayerBudgets | None:
        """Slots of each layer, if the caller gave them."""
        return None if isinstance(self.budgets, Profile | str | Path) else self.budgets

    @property
    def profile(self) -> str | Path | Profile | None:
        """The profile by which slots are shared out, if the caller did not give slots."""
        return self.budgets if isinstance(self.budgets, Profile | str | Path) else None

    def of_size(self, max_size: int) -> ModelSettings:
        """The same settings with another size, in slots."""
        own = self.budgets if self.layer_budgets is None else None
        return replace(self, max_size=max_size, max_bytes=None, budgets=own)

    def in_bytes(self, plain_bytes: int, context: int) -> ModelSettings:
        """The same settings with a context, and with a size in bytes where it was a share.

        Args:
            plain_bytes: Bytes of one token in a 16-bit cache.
            context: The most tokens of a conversation, if the caller does not say.
        """
        length = self.context or context
        size = self.max_bytes
        if isinstance(size, Share):
            size = max(int(size.part * length * plain_bytes), 1)
        return replace(self, max_bytes=size, context=length)

    def policy_for(self, attending: bool) -> Policy:
        """The policy, for a model that attends through this library (`attending`) or by itself."""
        if self.policy is None and not attending:
            return make_policy(DEFAULT_UNSEEN, **KEYS_ONLY)
        return make_policy(self.policy or DEFAULT_POLICY)


#: The options' defaults; all others are None.
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(ModelSettings) if field.name in NAMES
} | {"profile": PROFILES[0], "group_size": DEFAULT_GROUP_SIZE}


def _check_names(options: CacheOptions, policy: str | Policy | None) -> None:
    """Raise ValueError for names that are no options, and say where fields of the policy go."""
    unknown = [name for name, value in options.items() if value is not None and name not in NAMES]
    if not unknown:
        return
    own = make_policy(DEFAULT_POLICY if policy is None else policy)
    of_policy = [name for name in unknown if name in vars(own)]
    if of_policy:
        name = of_policy[0]
        raise ValueError(
            f"{name} is a field of the policy, with which it is given: "
            f"policy={type(own).__name__}({name}=...), or "
            f'policy="{own.name}:{name}=..." as text.'
        )
    raise ValueError(
        f"There is no option {', '.join(unknown)}."
        f"{_checks.suggestion(unknown[0], ['max_size', *NAMES])}"
    )


def budgets_of_model(budgets: Any) -> Profile | str | LayerBudgets | None:
    """The value of a model's `budgets=`; a profile's path is read.

    Raises:
        ValueError: It has another type, or the file is not a profile.
    """
    if budgets is None or isinstance(budgets, Profile):
        return budgets
    if isinstance(budgets, str) and budgets == "uniform":
        return "uniform"
    if isinstance(budgets, str | Path):
        return Profile.load(budgets)
    if _checks.is_list(budgets) and len(budgets):
        return tuple(budgets)
    if callable(budgets):
        return budgets  # type: ignore[no-any-return]
    raise ValueError(
        'budgets must be "uniform", a Profile, the path of one, a list with the slots of each of '
        f"the model's caches, or a function of a cache's index and KV heads; got "
        f"{_checks.shown(budgets)}."
    )


def check_rolling(attending: bool, remainder: bool, packing: Packing) -> None:
    """Raise ValueError if positions without gaps do not fit the other settings.

    Args:
        attending: Whether this library computes the attention.
        remainder: Whether evicted tokens keep contributing through the remainder.
        packing: How rows are stored.
    """
    if not attending:
        raise ValueError(
            'positions="rolling" needs attention through this library, and this model attends by '
            "itself: omit positions."
        )
    if remainder:
        raise ValueError(
            'positions="rolling" leaves evicted tokens no position, so there is no remainder: '
            "it needs remainder=False."
        )
    if packing.packs:
        raise ValueError(
            'positions="rolling" rotates keys at every step, but not packed keys: omit '
            "bits, k_bits and v_bits."
        )


def frames_or_none(frames: Any) -> tuple[Frame | None, ...] | str | None:
    """The value of a model's `frames=`: its caches' key scaling, "none", or None for the profile's.

    Raises:
        ValueError: `frames` has another type.
    """
    if frames is None:
        return None
    if frames is False or (isinstance(frames, str) and frames == "none"):
        return "none"
    if isinstance(frames, list | tuple) and all(
        frame is None or isinstance(frame, Frame) for frame in frames
    ):
        return tuple(frames)
    raise ValueError(
        'frames must be a list with a Frame or None for each cache of the model, or "none"; '
        f"got {_checks.shown(frames)}."
    )


def checked_undo(undo: Any) -> int:
    """A checked number of last tokens that can be taken back.

    Raises:
        ValueError: It is not a whole number from 0 to `MOST_STEPS`.
    """
    return _checks.whole("undo", undo, 0, MOST_STEPS)


def one_size(**sizes: Any) -> None:
    """Raise ValueError unless exactly one of these sizes is given."""
    names = [name for name, size in sizes.items() if size is not None]
    if len(names) != 1:
        got = f"both {' and '.join(names)}" if names else "none of them"
        raise ValueError(f"Give exactly one of {', '.join(sizes)}; got {got}.")


#: The options of `packing_of`.
OF_PACKING = ("bits", "k_bits", "v_bits", "group_size", "recent_bits")


def packing_of(
    bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    recent_bits: int | None = None,
) -> Packing:
    """How rows are stored, from the options that users give.

    Args:
        bits: Bits of keys and values; 16 or None for dense rows.
        k_bits: Bits of keys, instead of `bits`.
        v_bits: Bits of values, instead of `bits`.
        group_size: Elements that share a scale and a bias.
        recent_bits: Bits of the newest tokens, or None for the same as all others.

    Raises:
        ValueError: A number is not among those supported.
    """
    _checks.choice("bits", bits, (*BITS, UNPACKED, None))
    each = [bits if own is None else own for own in (k_bits, v_bits)]
    k, v = (None if own == UNPACKED else own for own in each)
    return Packing(k, v, group_size, recent_bits)
