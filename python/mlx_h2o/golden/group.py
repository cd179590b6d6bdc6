"""What a group of golden cases is."""

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
    """Cases of one kind; a module with these names is one."""

    #: Also the stem of its file.
    NAME: str

    def cases(self) -> Iterator[tuple[str, Parameters]]:
        """Names, unique within the group, and parameters."""

    def inputs(self, parameters: Parameters) -> Arrays:
        """What is stored because it is not generated."""

    def run(self, parameters: Parameters, inputs: Arrays) -> Arrays:
        """The results, by the backend that computes."""

    def watched(self, parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
        """The same results, and the least margin of the choices made (infinite where none is)."""


def parameters_of(policy: Policy) -> Parameters:
    """A policy with all its settings, spelled out so that no reader needs the defaults."""
    return {"name": policy.name, **asdict(policy)}


def policy_of(parameters: Parameters) -> Policy:
    """The policy that `parameters_of` described."""
    settings = dict(parameters)
    return make_policy(settings.pop("name"), **settings)
