"""Serves until it is killed; says its port. Arguments: folders of sessions and of rows, or "-"."""

import sys
import time
from pathlib import Path

from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.spill import state_keeping
from serving import serving

#: Slots of a head, and positions from one record to the next, here and in the tests.
SLOTS, EVERY = 48, 32


def settings(sessions, rows):
    """The settings of a server with these folders."""
    spill = {} if rows == "-" else {"spill": str(rows)}
    return {"sessions": Path(sessions), "defaults": {"max_size": SLOTS, **spill}}


if __name__ == "__main__":
    use_openblas()
    state_keeping.EVERY = EVERY
    with serving(**settings(*sys.argv[1:])) as running:
        print(running.httpd.server_port, flush=True)
        time.sleep(600)
