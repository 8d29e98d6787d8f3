"""Where things are. Pure Python: no MLIR, no target.

Two kinds of map, both printable, drawable, and callable on ints, numpy arrays and kernel `Value`s alike. So the checks
(who conflicts with whom, what is contiguous) run at trace time on the very functions that address memory at run time.

* `Layout`        coordinate -> element offset in memory. CuTe's shape:stride, leftmost mode fastest.
* `ThreadValues`  (thread, register) -> coordinate in a tile. Who holds what.
* `Swizzle`       offset -> offset: spreads neighbours over the banks of shared memory; `bank_conflicts` counts them.
"""

from .algebra import Layout, LayoutError, flatten, unflatten
from .banks import bank_conflicts
from .swizzle import IDENTITY, Swizzle
from .thread_values import Mode, ThreadValues

__all__ = [
    "IDENTITY",
    "Layout",
    "LayoutError",
    "Mode",
    "Swizzle",
    "ThreadValues",
    "bank_conflicts",
    "flatten",
    "unflatten",
]
