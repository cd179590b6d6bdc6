"""The methods of an evaluation: mlx-lm's own caches, mlx-h2o's, and policies, by their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.budgets.cost import group_size_of
from mlx_h2o.budgets.options import policy_and_options
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.budgets.settings import DEFAULT_POLICY, PROFILES, ModelSettings, budgets_of_model
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.compression.compress import compress_into
from mlx_h2o.compression.twice import Reading
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits
from mlx_h2o.evaluate.reader import Reader, Tell, read
from mlx_h2o.hosts.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.hosts.loaded import is_plain
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.policies import Policy

FULL = "full cache"
WINDOW = "sliding window"
OURS = "mlx-h2o"
#: mlx-lm's own packed caches, which keep every token.
PACKED = {"mlx-lm, 8 bits": 8, "mlx-lm, 4 bits": 4}
#: Tokens of the beginning that RotatingKVCache keeps in mlx-lm's own make_prompt_cache.
WINDOW_KEEP = 4
#: The name that stands in the place of a policy for the compression of prompts.
COMPRESSOR = "kvzip"
#: Slots of each head that a compressed prompt leaves for an answer.
ANSWER = 8
#: The default sizes: shares of a full 16-bit cache's bytes.
SHARES = (0.5, 0.25, 0.125, 0.0625)
#: A share is written as a fraction with no larger denominator.
LARGEST_DENOMINATOR = 64


@dataclass(frozen=True)
class Method:
    """A way to make a cache, and its size: that of a full cache, a share of it, or some tokens'.

    Attributes:
        label: The name without the size.
        policy: A policy, or its name with fields, or None for mlx-lm's own cache.
        remainder: Whether evicted tokens are kept as a remainder.
        budgets: As in `make_prompt_cache`.
        settings: Other options of `make_prompt_cache`, as pairs.
        profile: Whether a model without a profile is measured, as in `make_prompt_cache`.
        share: The share of a full 16-bit cache's bytes; None if `tokens` or nothing says the size.
        tokens: The tokens whose bytes in a 16-bit cache it gets, instead of a share.
        in_16_bits: Whether bytes are those of a 16-bit model, whichever dtype this one computes in
            (`equal_bytes`). If not, they are this model's, as of `make_prompt_cache` itself.
    """

    label: str
    policy: str | Policy | None = None
    remainder: bool = True
    budgets: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    profile: str = PROFILES[0]
    share: float | None = None
    tokens: int | None = None
    in_16_bits: bool = True

    @property
    def name(self) -> str:
        """The name with the size: "mlx-h2o, 1/8"."""
        return f"{self.label}, {self.size}" if self.size else self.label

    @property
    def size(self) -> str:
        """The size: "1/8", "128 tokens", or nothing if every token is kept."""
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        return "" if self.share is None else share_label(self.share)

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps every token, so that its bytes are its own."""
        return self.label == FULL or self.label in PACKED

    def plain_tokens(self, context: int) -> int:
        """The tokens whose bytes in a 16-bit cache it gets, in a conversation of `context`."""
        return self.tokens or max(round((self.share or 1) * context), 1)

    def make(self, model: nn.Module, context: int) -> list[Any]:
        """An empty cache for a conversation.

        Args:
            model: An mlx-lm model.
            context: The conversation's tokens.

        Raises:
            ValueError: The bytes are too few for it, or it does not suit the model.
        """
        if self.label in PACKED:
            return _packed(model, self.label)
        if self.label == FULL:
            return stock_caches(model)
        if self.policy is None:
            size = self.plain_tokens(context)
            return _in_place_of_plain(
                model, lambda: mlx_lm_cache.RotatingKVCache(max_size=size, keep=WINDOW_KEEP)
            )
        try:
            if not self.in_16_bits:
                return bounded_caches(model, ModelSettings.of(**self.options(model, context)))
            tokens = self.plain_tokens(context)
            return caches_in_16_bits(model, self.model_settings(), tokens, context)
        except ValueError as error:
            raise ValueError(f"{self.name} of {context} tokens: {error}") from error

    def after(self, reader: Reader, tokens: mx.array, context: int, tell: Tell) -> list[Any]:
        """A cache that has read a prompt `[B, T]` of a conversation of `context` tokens.

        Args:
            reader: Model and text.
            tokens: The prompt `[B, T]`.
            context: The conversation's tokens in all.
            tell: Called with the tokens read since the last call.

        Raises:
            ValueError: The bytes are too few for it.
        """
        cache = self.make(reader.model, context)
        read(reader.model, cache, tokens, reader.chunk, tell)
        return cache

    @property
    def readings(self) -> int:
        """How often a prompt is read."""
        return 1

    def options(self, model: nn.Module, context: int) -> dict[str, Any]:
        """The arguments of `make_prompt_cache` for this cache.

        Args:
            model: The model, whose rows say how many bytes tokens take.
            context: The conversation's tokens.
        """
        size: int | str = f"{100 * (self.share or 1):g}%"
        if self.tokens is not None:
            size = self.tokens * sum(map(plain_bytes, layer_kinds(model)))
        keywords: dict[str, Any] = {"max_bytes": size, "context": context}
        if self.policy != DEFAULT_POLICY:
            keywords["policy"] = self.policy
        if self.profile != PROFILES[0]:
            keywords["profile"] = self.profile
        if self.budgets:
            keywords["budgets"] = self.budgets
        if not self.remainder:
            keywords["remainder"] = False
        return keywords | dict(self.settings)

    def code(self, model: nn.Module, context: int) -> str:
        """The line of code that makes this cache; the arguments are those of `options`."""
        arguments = ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"
            for name, value in self.options(model, context).items()
        )
        return f"cache = mlx_h2o.make_prompt_cache(model, {arguments})"

    def model_settings(self) -> ModelSettings:
        """The settings of a policy's caches, with a size that stands for any."""
        options: dict[str, Any] = {
            "max_bytes": "100%",
            "policy": self.policy,
            "remainder": self.remainder,
            "budgets": self.budgets,
            "profile": self.profile,
            **dict(self.settings),
        }
        return ModelSettings.of(**options)

    def described(self) -> str:
        """The cache in words, with every default written out."""
        if self.policy is None:
            return "mlx-lm's own"
        settings = self.model_settings()
        policy = settings.policy_for(attending=True)
        fields = ", ".join(f"{name}={value}" for name, value in asdict(policy).items())
        parts = (
            "remainder" if self.remainder else "no remainder",
            Path(self.budgets).name if self.budgets else "the model's own profile",
            "bits by bytes" if settings.chooses_bits else str(settings.packing).strip(),
            f"undo {settings.undo}" if settings.undo else "",
            "" if self.profile == PROFILES[0] else f"profile {self.profile}",
        )
        return ", ".join([f"{policy.name}({fields})", *filter(None, parts)])


class Compressor(Method):
    """KVzip: a prompt that is known whole is read twice, and cut down once."""

    @property
    def readings(self) -> int:
        return 2

    def make(self, model: nn.Module, context: int) -> list[Any]:
        raise ValueError(
            f"{COMPRESSOR} cuts prompts down that are known whole; it does not read along."
        )

    def after(self, reader: Reader, tokens: mx.array, context: int, tell: Tell) -> list[Any]:
        # Question and answer get the rest of the bytes, and nothing beyond them.
        room = context - tokens.shape[1] + ANSWER
        cache = super().make(reader.model, context)
        reading = Reading(chunk=reader.chunk, room=room, within=True)
        compress_into(cache, reader.model, reader.tokenizer, tokens, reading, tell=tell)
        return cache


def _packed(model: nn.Module, label: str) -> list[Any]:
    """mlx-lm's packed caches; ValueError if this model's rows are too narrow."""
    group_size = group_size_of([kind.widths for kind in layer_kinds(model)])
    if group_size is None:
        raise ValueError(f"{label}: this model's keys and values are too narrow to be packed.")
    bits = PACKED[label]
    return _in_place_of_plain(
        model, lambda: mlx_lm_cache.QuantizedKVCache(group_size=group_size, bits=bits)
    )


def _in_place_of_plain(model: nn.Module, make: Any) -> list[Any]:
    """The model's own caches, with another in the place of each plain one."""
    return [make() if is_plain(entry) else entry for entry in stock_caches(model)]


def share_label(share: float) -> str:
    """0.125 as "1/8", 0.3 as "30%"."""
    part = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
    return str(part) if part.numerator == 1 else f"{share:.0%}"


def parse_method(spec: str) -> Method:
    """A method as written on the command line, without a size.

    Args:
        spec: A policy with its fields and options of its caches: `h2o`, `h2o:recent=64`,
            `salient:bits=6:budgets=profile`, `keydiff:remainder=false`. Budgets are uniform unless
            the text names others, and rows are dense. `mlx-h2o` is the default cache, whose profile
            chooses bits, too: `mlx-h2o:bits=16`, `mlx-h2o:budgets=uniform`. `kvzip` compresses
            prompts.

    Raises:
        ValueError: There is no such policy or setting.
    """
    policy, options = policy_and_options(spec)
    remainder = options.pop("remainder", True)
    name, *fields = policy.split(":", 1)
    if name in (OURS, COMPRESSOR):
        policy = ":".join([DEFAULT_POLICY, *fields])
        budgets = options.pop("budgets", None)
        kind = Compressor if name == COMPRESSOR else Method
        made = kind(spec, policy, remainder, budgets, tuple(options.items()))
    else:
        budgets = options.pop("budgets", "uniform")
        budgets = None if budgets == "profile" else budgets
        if not any(option.endswith("bits") for option in options):
            options["bits"] = 16
        made = Method(spec, policy, remainder, budgets, tuple(options.items()))
    made.model_settings()
    return made


def default_methods(
    policies: Sequence[str] = (), budgets: str | None = None, profile: str = PROFILES[0]
) -> list[Method]:
    """mlx-lm's full and packed caches, its window, mlx-h2o's, and policies, without sizes.

    Args:
        policies: The policies, as `parse_method` reads them.
        budgets: "uniform" or a profile's path instead of the model's own, for mlx-h2o's.
        profile: Whether a model without a profile is measured.

    Raises:
        ValueError: A policy or a setting is invalid, or the profile is unreadable.
    """
    budgets_of_model(budgets)
    ours = [Method(OURS, DEFAULT_POLICY, budgets=budgets), *map(parse_method, policies)]
    mlx_lm = [Method(label) for label in (FULL, *PACKED, WINDOW)]
    return [*mlx_lm, *(replace(method, profile=profile) for method in ours)]


def sized(
    methods: Sequence[Method], shares: Sequence[float] = (), tokens: Sequence[int] = ()
) -> list[Method]:
    """Methods that keep every token once, and then the others in each size.

    Args:
        methods: The methods, without sizes.
        shares: Shares of a full 16-bit cache's bytes.
        tokens: Tokens whose bytes the caches get.

    Raises:
        ValueError: A size is invalid.
    """
    for share in shares:
        if not 0 < share < 1:
            raise ValueError(f"A share of the bytes must be between 0 and 1; got {share}.")
    if any(count < 1 for count in tokens):
        raise ValueError("--max-kv-size must be at least 1.")
    bounded = [method for method in methods if not method.keeps_all]
    return [
        *(method for method in methods if method.keeps_all),
        *(replace(method, share=share) for share in shares for method in bounded),
        *(replace(method, tokens=count) for count in tokens for method in bounded),
    ]


def profile_digests(model: nn.Module, methods: Sequence[Method]) -> dict[str, str]:
    """A digest of each method's profile, by the names of the methods that share slots by one.

    A model that has no profile yet is measured now if its caches ask for one.
    """
    by_policy = [method for method in methods if method.policy]
    chosen = [method for method in by_policy if not dict(method.settings).get("bits")]
    if any(not method.budgets and method.profile == PROFILES[0] for method in chosen):
        profile_at_load(model)
    if not by_policy:
        return {}
    identity = identity_by_kinds(model, layer_kinds(model))
    # Each profile is read and hashed once, however many caches use it.
    digests = {}
    for budgets in {method.budgets for method in by_policy}:
        profile = budgets_of_model(budgets) if budgets else found_profile(model, identity)
        if isinstance(profile, Profile):
            digests[budgets] = profile.digest
    return {
        method.name: digests[method.budgets] for method in by_policy if method.budgets in digests
    }
