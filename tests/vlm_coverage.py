"""What bounded caches do with the language model of every module of mlx-vlm, tiny and random."""

from __future__ import annotations

from model_coverage import BOUNDED, NOT_RUN, PARTLY, Row, row_of
from model_matrix import packed
from vlm_models import vlm_model

#: Where a module's language model cannot be made from the tiny config.
UNMADE = "no tiny config makes it yet"


def vlm_line(name: str) -> str:
    """A module's line of docs/reference/vision-models.md."""
    try:
        model = vlm_model(name)
    except Exception as error:  # of any module, about its config
        row = Row(NOT_RUN, f"{UNMADE} ({type(error).__name__})")
    else:
        row = row_of(model)
        if row.memory in (BOUNDED, PARTLY):
            return f"| {name} | {row.memory} | {row.how} | {packed(model)} |"
    how = " ".join(row.how.split()).replace("|", "/").replace("mlx-lm's own", "mlx-vlm's own")
    return f"| {name} | {row.memory} | {how} | |"
