"""The board: every rival at equal bytes, in one run, on texts that nothing was tuned on.

    python -m benchmarks.board --quick      # ten minutes on two idle cores
    python -m benchmarks.board --evening    # hours
    python -m benchmarks.board --resume     # a night

Every rival reads the same prompts with the same weights, and then the same continuations token by
token. Its predictions are compared with the full cache's.
"""

from benchmarks.board.command import main as main
from benchmarks.board.command import parser as parser
