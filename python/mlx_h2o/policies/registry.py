"""Policies by name: registration, published settings, and fields as text."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mlx_h2o import _checks
from mlx_h2o.policies.base import Policy

_POLICIES: dict[str, type[Policy]] = {}
_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}


def register_policy(name: str):  # type: ignore[no-untyped-def]
    """Class decorator: make a Policy dataclass available as `policy=name`.

    Raises:
        ValueError: The class is no Policy, or the name is one of the library's, by which saved
            caches find their policy.
    """

    def register(cls: type[Policy]) -> type[Policy]:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise ValueError(f"{cls!r} must subclass mlx_h2o.Policy to be registered.")
        library = __name__.partition(".")[0] + "."
        module = _POLICIES[name].__module__ if name in _POLICIES else ""
        if not cls.__module__.startswith(library) and (
            name in _PRESETS or module.startswith(library)
        ):
            raise ValueError(f"Policy {name} is of the library: choose another name.")
        cls.name = name
        _POLICIES[name] = cls
        return cls

    return register


def register_preset(name: str, policy: str, **settings: Any) -> None:
    """Make published settings of a policy available under a name of their own."""
    _PRESETS[name] = (policy, settings)


def policy_names() -> list[str]:
    """Registered policies, then presets."""
    return [*_POLICIES, *_PRESETS]


def make_policy(policy: str | Policy, **settings: Any) -> Policy:
    """A policy by name (or a given one), with fields changed.

    Args:
        policy: A Policy, or the name of a registered one or of a preset, with fields if wanted:
            "salient:recent=64:age_weight=0.5".
        settings: Fields to change; None leaves a field as it is.

    Raises:
        ValueError: The name or a field is unknown, or a value is out of range.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    preset: dict[str, Any] = {}
    if isinstance(policy, str):
        policy, *field_texts = policy.split(":")
        settings = dict(map(field_of_text, field_texts)) | settings
        name, preset = _PRESETS.get(policy, (policy, {}))
        if name not in _POLICIES:
            raise ValueError(
                f"Unknown policy {_checks.shown(policy)}; choose from {', '.join(policy_names())}."
                f"{_checks.suggestion(policy, policy_names())}"
            )
        cls = _POLICIES[name]
    elif isinstance(policy, Policy):
        cls = type(policy)
    else:
        raise ValueError(f"policy must be a name or a Policy; got {_checks.shown(policy)}.")
    names = [f.name for f in fields(cls)]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ValueError(
            f"Policy {cls.name!r} has no field {', '.join(unknown)}; it has {', '.join(names)}."
            f"{_checks.suggestion(unknown[0], names)}"
        )
    if isinstance(policy, str):
        return cls(**{**preset, **settings})
    return replace(policy, **settings)


def field_of_text(text: str) -> tuple[str, Any]:
    """The pair (FIELD, VALUE) of a text FIELD=VALUE.

    Raises:
        ValueError: The text has no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"A policy's field is written FIELD=VALUE; got {text!r}.")
    return name.replace("-", "_"), value_of_text(value)


def value_of_text(text: str) -> Any:
    """A count ("64"), a number ("0.25"), true or false, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
