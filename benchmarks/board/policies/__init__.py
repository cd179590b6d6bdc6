"""Published policies that the board measures: examples of `register_policy`, one a file.

They use the public interface alone, as a policy of your own would. Importing this package makes
them available by name, as `policy="chunkkv"` or `policy="r-kv"`.
"""

from benchmarks.board.policies.chunkkv import ChunkKV
from benchmarks.board.policies.rkv import RKV

__all__ = ["RKV", "ChunkKV"]
