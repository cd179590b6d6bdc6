"""`python -m benchmarks.board`."""

import sys

from benchmarks.board.command import main

if __name__ == "__main__":
    sys.exit(main())
