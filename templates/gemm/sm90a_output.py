"""From sums in registers to C on sm_90a: bias, activation, residual, and stores that are as wide as C allows.

wgmma leaves two neighbours of a row in each lane. Where C allows 16-byte vectors, each warp turns its rows round in
shared memory of its own, a few columns at a time, and stores them; or a warpgroup leaves that to TMA, and goes on.
What the next columns need from memory is fetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flykernels.lang import Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.layout import IDENTITY, Mode, Swizzle, ThreadValues
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets.sm90a_wgmma import sums_layout

from .epilogue import finish
from .problem import GemmProblem
from .sm90a_config import (
    BLOCK_M,
    SHELF_COLUMNS,
    SHELVES,
    SWIZZLE_MOST,
    TMA_BYTES,
    WARP,
    WARPGROUP,
    Sm90aConfig,
    shelf_pitch,
    stores_wide,
)

WARP_ROWS, WARPS = 16, 4  # of a block of 64 rows, a warp's; of a warpgroup
WIDTHS = (SHELF_COLUMNS, 32, 16)  # columns of a part
EARLY_SUMS = 64  # of C a thread, up to which registers hold what is added before it is needed
SHELF_READY = 3  # the first warpgroup's named barrier; the others' follow


class Part(NamedTuple):
    """A block of 64 rows and some columns of each warpgroup's sums."""

    block: int
    column: int
    columns: int


def parts(p: GemmProblem, cfg: Sm90aConfig) -> list[Part]:
    """What is turned round at a time, in order: columns in powers of two. TMA's boxes are all alike: where they do not
    divide a warpgroup's columns, the last one begins early and writes some columns again."""
    if cfg.tma_store:
        width = SWIZZLE_MOST // p.output_type.bytes
        starts = [min(c, cfg.columns - width) for c in range(0, cfg.columns, width)]
        return [Part(block, start, width) for block in range(cfg.blocks) for start in starts]
    least = cfg.columns // cfg.split_k if cfg.k_cluster else cfg.columns
    out = []
    for block in range(cfg.blocks):
        column = 0
        while column < cfg.columns:
            width = next(w for w in WIDTHS if column + w <= cfg.columns and (w <= least or w == WIDTHS[-1]))
            out.append(Part(block, column, width))
            column += width
    return out


class Output:
    """One tile of C, and what is added to it.

    view   name -> the argument as a View of this batch
    at     (row, column) of the tile
    batch  its coordinate in C's tensor map: () or one
    row    of C's tensor map that the view begins with
    shelf  pointer to `shelf_bytes` of shared memory"""

    def __init__(
        self, k: Kernel, p: GemmProblem, cfg: Sm90aConfig, view: Callable[[str], View], at, batch, shelf, row=0
    ):  # fmt: skip
        self.k, self.p, self.cfg, self.shelf = k, p, cfg, shelf
        self.at, self.batch, self.row = at, batch, row
        self.group = k.thread // WARPGROUP  # the warpgroup's number
        self.sender = (k.thread % WARPGROUP).equals(0)
        tile = (cfg.tile_m, cfg.tile_n)
        self.c = view("c").tile(tile, *at)
        self.residual = view("residual").tile(tile, *at) if p.residual else None
        self.bias: View | None = None
        if p.bias == "row":
            self.bias = view("bias").tile(tile[1:], at[1])
        elif p.bias == "full":
            self.bias = view("bias").tile(tile, *at)
        self.parts = parts(p, cfg)
        self.wide = stores_wide(p)

    # -- who holds what
    def _within(self, part: Part, threads, vector: Mode, pieces) -> ThreadValues:
        """Threads of all warpgroups over the tile, at a part of each one's sums."""
        cfg = self.cfg
        groups = (Mode(cfg.groups[0], 0, BLOCK_M * cfg.blocks), Mode(cfg.groups[1], 1, cfg.columns))
        start = (BLOCK_M * part.block, part.column)
        rest = (cfg.tile_m - start[0], cfg.tile_n - start[1])
        return ThreadValues(rest, (*threads, *groups), vector, pieces, start)

    def held(self, part: Part) -> ThreadValues:
        """As wgmma leaves sums."""
        one = sums_layout(part.columns, 1, (1, 1))
        return self._within(part, one.threads[:3], one.vector, one.pieces[:2])

    def taken(self, part: Part) -> ThreadValues:
        """By rows, 16 bytes a lane."""
        _, threads, vector, pieces = self._by_rows(part)
        return self._within(part, threads, vector, pieces)

    def _by_rows(self, part: Part):
        vector = TMA_BYTES // self.p.output_type.bytes
        across = part.columns // vector
        deep = min(WARP // across, WARP_ROWS)
        threads = (Mode(across, 1, vector), Mode(deep, 0, 1), Mode(WARPS, 0, WARP_ROWS))
        return deep, threads, Mode(vector, 1, 1), (Mode(WARP_ROWS // deep, 0, deep),)

    def _shelf(self, number: int) -> tuple[View, ThreadValues, ThreadValues]:
        """(the shelf of a part, who puts sums there, who takes rows): 64 rows of each warpgroup, one below the other.

        For TMA the rows lie as the tensor map's swizzle wants them: 16-byte chunks of a row, permuted by its number."""
        part, out = self.parts[number], self.p.output_type
        groups = self.cfg.groups[0] * self.cfg.groups[1]
        size, pitch, swizzle = BLOCK_M * groups, shelf_pitch(self.p, min(SHELF_COLUMNS, self.cfg.columns)), IDENTITY
        pointer = self.shelf
        if self.cfg.tma_store:
            pitch, chunk = SWIZZLE_MOST // out.bytes, (TMA_BYTES // out.bytes).bit_length() - 1
            swizzle = Swizzle(3, chunk, 3)
            pointer = advance(pointer, number % SHELVES * size * pitch, out)
        view = View(pointer, out, (size, part.columns), (pitch, 1), swizzle)
        put, (_, threads, vector, pieces) = sums_layout(part.columns, 1, (groups, 1)), self._by_rows(part)
        put = ThreadValues(view.shape, put.threads[:4], put.vector, put.pieces[:2])
        return view, put, ThreadValues(view.shape, (*threads, Mode(groups, 0, BLOCK_M)), vector, pieces)

    # -- what is added
    def fetch(self, number: int) -> dict[str, Fragment]:
        """Bias and residual of a part, on their way from memory: the residual by rows if it is turned round.

        Where sums leave few registers, the bias comes when it is needed: many tiles share it, and L1 or L2 has it."""
        if number >= len(self.parts):
            return {}
        k, part, got = self.k, self.parts[number], {}
        bias = self._bias(part) if self.cfg.sums <= EARLY_SUMS else None
        if bias is not None:
            got["bias"] = bias
        if self.residual is not None:
            got["residual"] = k.fragment(self.taken(part) if self.wide else self.held(part)).load(self.residual)
        return got

    def _bias(self, part: Part) -> Fragment | None:
        if self.bias is None:
            return None
        return self.k.fragment(self.held(part), elementwise=self.p.bias == "full").load(self.bias)

    def store(self, sums: Fragment, first: dict[str, Fragment], numbers: Sequence[int] | None = None) -> None:
        """Finishes and writes the tile, or the parts of these numbers. first: what `fetch` gave for the first."""
        k, added = self.k, first
        order = list(range(len(self.parts)) if numbers is None else numbers)
        for number, after in zip(order, [*order[1:], len(self.parts)]):
            part = self.parts[number]
            acc = self._part_of(sums, part)
            coming = self.fetch(after)
            if not self.wide:
                bias = added.get("bias") or self._bias(part)
                out = finish(acc, bias, self.p.activation, added.get("residual"))
                k.fragment(self.held(part)).store(self.c, out.to(self.p.output_type))
                added = coming
                continue
            shelf, put, take = self._shelf(number)
            if self.cfg.tma_store:
                self._shelf_free(number)
            residual = None
            if "residual" in added:
                k.fragment(take).store(shelf, added["residual"])
                barriers.warp_barrier()
                residual = k.fragment(put).load(shelf)
            bias = added.get("bias") or self._bias(part)
            out = finish(acc, bias, self.p.activation, residual, by_pairs=True)
            k.fragment(put).store(shelf, out.to(self.p.output_type))
            if self.cfg.tma_store:
                self._send(part, shelf)
            else:
                barriers.warp_barrier()
                k.fragment(self.taken(part)).store(self.c, k.fragment(take).load(shelf))
                barriers.warp_barrier()  # read before the next part is put there
            added = coming

    # -- TMA: one thread of each warpgroup sends what all have put on the shelf
    def _shelf_free(self, number: int) -> None:
        """The box that was sent from this part's shelf has left it."""
        odd_end = number == 0 and len(self.parts) % SHELVES  # the last tile's last part had the same shelf

        @self.k.when(self.sender)
        def _():
            tma.wait_stores_read(0 if odd_end else SHELVES - 1)

        barriers.named_barrier(SHELF_READY + self.group, WARPGROUP)

    def shelf_left(self) -> None:
        """Every box that was sent has left its shelf: it may be used otherwise."""
        self.k.when(self.sender)(lambda: tma.wait_stores_read(0))
        barriers.named_barrier(SHELF_READY + self.group, WARPGROUP)

    def _send(self, part: Part, shelf: View) -> None:
        cfg = self.cfg
        barriers.fence_async()
        barriers.named_barrier(SHELF_READY + self.group, WARPGROUP)

        @self.k.when(self.sender)
        def _():
            along_m, along_n = self.group % cfg.groups[0], self.group // cfg.groups[0]
            row = self.at[0] * cfg.tile_m + (along_m * (BLOCK_M * cfg.blocks) + BLOCK_M * part.block) + self.row
            column = self.at[1] * cfg.tile_n + (along_n * cfg.columns + part.column)
            source = advance(shelf.pointer, self.group * (BLOCK_M * SWIZZLE_MOST // shelf.dtype.bytes), shelf.dtype)
            tma.store_box(self.k.tensor_map("c_map"), source, (column, row, *self.batch))
            tma.commit_stores()

    def _part_of(self, sums: Fragment, part: Part) -> Fragment:
        pick = lambda d: sums[d[0], part.column // 8 + d[1], part.block]
        return Fragment(self.k, self.held(part), False, pick)
