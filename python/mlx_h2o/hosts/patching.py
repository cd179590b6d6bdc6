"""Replacing functions of mlx-lm by ours, and putting them back."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(old: Any, new: Any) -> None:
    """Let every loaded module that holds `old`, by whatever name, hold `new`.

    Modules imported later find `new` where they import it from. Our own modules keep `old`: they
    must still reach mlx-lm's function.
    """
    # A copy is one step of the interpreter: other threads may import meanwhile.
    for name, module in sys.modules.copy().items():
        if name == "mlx_h2o" or name.startswith("mlx_h2o."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, attribute, new)
