"""All groups, in the order of the files."""

from __future__ import annotations

from typing import cast

from golden import (
    accumulate,
    attention,
    filling,
    framed,
    model,
    quantized,
    remainder,
    returning,
    selection,
    trajectory,
    turns,
    twice,
)
from golden.group import Group

GROUPS: dict[str, Group] = {
    module.NAME: cast(Group, module)
    for module in (
        attention,
        quantized,
        remainder,
        accumulate,
        selection,
        trajectory,
        framed,
        turns,
        filling,
        returning,
        twice,
        model,
    )
}
