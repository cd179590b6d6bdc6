"""The interface of a group of golden cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import mlx.core as mx

from mlx_h2o.policies import Policy, make_policy

#: A case's parameters: JSON types only.
Parameters = dict[str, Any]
Arrays = Mapping[str, mx.array]


class Group(Protocol):
    """Cases of one kind; each module of cases has these names."""

    #: The group's name, and the stem of its file.
    NAME: str

    def cases(self) -> Iterator[tuple[str, Parameters]]:
        """Cases as names, unique within the group, and parameters."""

    def inputs(self, parameters: Parameters) -> Arrays:
        """The stored arrays of a case, which are not generated."""

    def run(self, parameters: Parameters, inputs: Arrays) -> Arrays:
        """The results, computed by the active backend."""

    def watched(self, parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
        """The same results, and the smallest margin of the choices (infinite if there is none)."""


def parameters_of(policy: Policy) -> Parameters:
    """A policy with all its settings spelled out, so that readers need not know the defaults."""
    return {"name": policy.name, **asdict(policy)}


def policy_of(parameters: Parameters) -> Policy:
    """The policy that `parameters_of` described."""
    settings = dict(parameters)
    return make_policy(settings.pop("name"), **settings)
