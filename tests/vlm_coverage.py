"""What bounded caches do with the language model of every module of mlx-vlm, tiny and random."""

import mlx.nn as nn

from model_coverage import BOUNDED, NOT_RUN, PARTLY, Row, row_of
from model_matrix import packed
from vlm_models import vlm_model

#: Where a module's language model cannot be made from the tiny config.
UNMADE = "no tiny config makes it yet"
#: Where a bounded cache is made and does not do what the plain one does.
FAILS = "fails"


#: They label or embed tokens, though their language models make caches; or they see alone, and
#: are large.
ENCODERS = ("lfm2_encoder", "openai_privacy_filter", "moge3")
#: Modules that end a process, whatever their caches, and why.
FATAL = {"phi3small": "its logits are masked outside their array"}
#: What modules say that see, embed or hear, and generate no tokens.
NO_TOKENS = ("EmbeddingOutput", "no attribute 'layers'", "no attribute 'ModelConfig'")


def vlm_line(name: str) -> str:
    """A module's line of docs/reference/vision-models.md; empty if it generates no tokens."""
    if name in ENCODERS:
        return ""
    if name in FATAL:
        return f"| {name} | {NOT_RUN} | {FATAL[name]} | |"
    try:
        model = vlm_model(name)
    except ModuleNotFoundError as error:
        row = Row(NOT_RUN, f"it needs {error.name}")
    except Exception as error:  # of any module, about its config
        row = Row(NOT_RUN, f"{UNMADE}: {type(error).__name__}: {_reason(error)}")
    else:
        try:
            row = row_of(model)
            if row.memory in (BOUNDED, PARTLY):
                return f"| {name} | {row.memory} | {row.how} | {_packed(model)} |"
        except Exception as error:
            row = Row(FAILS, f"{type(error).__name__}: {_reason(error)}")
    if row.memory == NOT_RUN and any(words in row.how for words in NO_TOKENS):
        return ""
    how = " ".join(row.how.split()).replace("|", "/").replace("mlx-lm's own", "mlx-vlm's own")
    if row.memory == NOT_RUN:  # whatever the error is, it is about the tiny config
        how = how.partition(": ")[0]
    return f"| {name} | {row.memory} | {how} | |"


def _reason(error: Exception) -> str:
    return str(error).partition(chr(10))[0][:120]


def _packed(model: nn.Module) -> str:
    """Whether rows can be packed; a tiny config may have widths that cannot."""
    try:
        return packed(model)
    except ValueError:
        return "refused"
    except AssertionError:
        return "far off"
