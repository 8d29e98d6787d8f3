"""One object a target: its limits, its few instructions the language needs, its way to code. Everything else is shared.

lanes                                threads that exchange registers (1: none)
thread, subgroup, workgroup_id       who am I
exchange(value, d)                   (a, b): in some order this lane's value and that of lane ^ d
barrier, shared_memory               the workgroup
compile(kernel)                      code, with what it costs
"""

from .gfx950 import gfx950
from .sm90a import sm90a
from .x86 import x86

__all__ = ["gfx950", "sm90a", "x86"]
