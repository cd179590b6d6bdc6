"""Replacing functions of mlx-lm by ours, and putting them back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def replace_everywhere(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Let every loaded module that holds an old object, by whatever name, hold the new one.

    Modules imported later find the new one where they import it from. Our own modules keep the old
    one: they must still reach mlx-lm's function.

    Args:
        pairs: Each old object, and what comes into its place.
    """
    # The pair keeps the old object alive, so that no other one gets its id.
    by_id = {id(pair[0]): pair for pair in pairs}
    # A copy is one step of the interpreter: other threads may import meanwhile.
    for name, module in sys.modules.copy().items():
        if name == "mlx_h2o" or name.startswith("mlx_h2o."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if (pair := by_id.get(id(value))) is not None:
                setattr(module, attribute, pair[1])
