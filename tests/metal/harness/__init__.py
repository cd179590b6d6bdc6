"""The host harness: runs the kernels of metal/ on this machine, and watches them.

`metal_kernel` stands where `mx.fast.metal_kernel` does. A kernel is built for the host and run
threadgroup by threadgroup, with one fiber per lane, real simdgroup operations and real barriers.
Anything that a GPU would not forgive, or not tell, is an error with the kernel, buffer, index and
lane in its message.
"""

from .compiler import BuildError
from .dialect import DialectError
from .kernel import HostKernel, metal_kernel, recorded
from .launch import Counts, KernelError

__all__ = [
    "BuildError",
    "Counts",
    "DialectError",
    "HostKernel",
    "KernelError",
    "metal_kernel",
    "recorded",
]
