"""Appends rows to a file until it is killed; says after each token how many are safe."""

import sys

from mlx_h2o.spill.row_file import RowFile
from rows_for_files import append

if __name__ == "__main__":
    with RowFile.open(sys.argv[1]) as file:
        position = file.written
        while True:
            append(file, position, 1)
            position += 1
            print(file.written, flush=True)
