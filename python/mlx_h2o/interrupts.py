"""Ctrl-C while the command imports its modules: it ends at once and without a traceback.

The package imports this first. `cli.main` handles Ctrl-C itself, and puts Python's handler back.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

# What sys.argv begins with while the command is starting: its script's name, or that of -m, which
# is replaced by a path before any module outside this package runs.
COMMANDS = ("mlx_h2o", "-m")


def end_quietly() -> None:
    """Let Ctrl-C end this process by the signal itself, if it is the command."""
    if (
        Path(sys.argv[0] if sys.argv else "").name in COMMANDS
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def handle_again() -> None:
    """Undo `end_quietly`, if it did anything."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


end_quietly()
