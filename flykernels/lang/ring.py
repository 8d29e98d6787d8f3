"""A ring of LDS stages fed from memory without registers (gfx950's direct-to-LDS loads)."""

from __future__ import annotations

import numpy as np

from ..layout import IDENTITY, Layout, ThreadValues
from .kernel import Kernel
from .memory import View, advance


class Ring:
    """`stages` tiles of a (rows, depth) operand in LDS, row-major, swizzled.

    Direct loads write LDS lane after lane, 16 bytes each: they cannot permute. So the permutation is done on the memory
    side: the thread whose bytes land at element e fetches the coordinate that belongs there, unflatten(swizzle(e)); a
    swizzle is its own inverse."""

    def __init__(self, k: Kernel, source: View, tile: tuple, stages: int, swizzle=IDENTITY):
        rows, depth = tile
        self.k, self.source, self.stages, self.depth = k, source, stages, depth
        self.tiles = source.shape[1] // depth
        self.lds = k.shared(source.dtype, Layout.compact(stages, rows, depth), swizzle)
        chunk = 16 // source.dtype.bytes  # elements in the 16 bytes of a lane
        self.loads = rows * depth // (chunk * k.workgroup_size)  # instructions a thread and a tile

        def fetched(thread, load):  # byte offset in memory, from the tile's origin
            e = swizzle((thread + load * k.workgroup_size) * chunk)
            return (e // depth * source.stride[0] + e % depth * source.stride[1]) * source.dtype.bytes

        self.lane_bytes = k.once(("ring", rows, depth, swizzle, source.stride), lambda: fetched(k.thread, 0))
        everyone = np.arange(k.workgroup_size)
        steps = [np.unique(fetched(everyone, i) - fetched(everyone, 0)) for i in range(self.loads)]
        assert all(len(s) == 1 for s in steps), "loads of one tile must differ by a constant"
        self.load_bytes = [int(s[0]) for s in steps]
        self.wave_elements = chunk * k.target.lanes
        self.buffer = k.target.buffer(
            source.pointer, ((rows - 1) * source.stride[0] + source.shape[1]) * source.dtype.bytes
        )
        self.scope = k.target.alias_scope(k)

    def stage(self, t):
        """The LDS tile that K tile `t` lives in; its reads are known not to meet loads in flight (the kernel waits)."""
        return self.lds[t % self.stages].tagged(noalias_scopes=self.scope)

    def prefetch(self, t):
        """Start bringing in K tile `t`: `loads` instructions, counted by wait_loads."""
        k, into = self.k, self.lds[t % self.stages]
        tile_bytes = t * (self.depth * self.source.dtype.bytes)
        for i, more in enumerate(self.load_bytes):
            at = advance(
                into.pointer,
                (k.subgroup + i * (k.workgroup_size // k.target.lanes)) * self.wave_elements,
                self.source.dtype,
            )
            k.target.load_to_shared(self.buffer, at, self.lane_bytes, tile_bytes + more, self.scope)

    def read(self, layout: ThreadValues, t, step):
        """Operand fragment of K step `step` of tile `t`."""
        return self.k.fragment(layout.shifted(0, step * layout.tile[1])).load(self.stage(t))
