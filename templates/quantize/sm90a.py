"""Both orientations on sm_90a: X comes once, by TMA, and rows and columns have warps of their own.

A tile is 128 bytes of X wide and as many rows deep as fill a line (128 bytes) of the transposed codes. One warp brings
tiles into a ring in shared memory; a warp for each 32 rows encodes them along rows, another along columns, and neither
side waits for the other. A workgroup does a piece of X of several tiles along rows and down columns: what leaves
are whole lines of codes, and the scales of a piece together. A line of L2 costs its time however little of it a store
fills.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flykernels.codeobject import Extent, TensorMap
from flykernels.dtypes import i8, i32, u8
from flykernels.lang import Kernel, Mode, Swizzle, ThreadValues, View, constant, minimum
from flykernels.lang.memory import advance
from flykernels.lang.microscaling import words, words_down
from flykernels.lang.values import Value, vector_of
from flykernels.layout import IDENTITY
from flykernels.microscaling import BLOCK
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma

from .arguments import declared
from .gpu import largest_of, lines, matrix, most_of, scales_of, shared, store
from .problem import QuantizeProblem

LINE = 128  # bytes: a line of L2, and the widest rows that TMA turns round (its swizzle)
WIDE = 4  # words: the widest access
WARP = 32  # threads
EACH = 16  # neighbours of a row that a thread encodes: half a block
ROWS_READY, COLUMNS_READY = 1, 2  # named barriers
ALIGNMENT = 1024  # bytes after which TMA's swizzle repeats
OTHER = Mode(2, 0, 0)  # a thread's last digit: its role


@dataclass(frozen=True)
class RingConfig:
    """How X is dealt out.

    along, down  tiles of a workgroup's piece
    stages       of the ring
    beside       workgroups on a multiprocessor
    band         rows of a tile, as the problem's format wants them: threads that encode rows, and that encode columns
    """

    along: int = 8
    down: int = 4
    stages: int = 4
    beside: int = 2
    band: int = LINE

    @property
    def workgroup_size(self) -> int:
        return 2 * self.band + WARP

    def __str__(self) -> str:
        return f"ring of {self.stages}, pieces of {self.down}x{self.along} tiles, {self.beside} beside"

    def key(self) -> dict:
        """Readable JSON form."""
        return asdict(self)


def why_not(p: QuantizeProblem) -> str | None:
    """Why this kernel does not serve the problem, in words; None if it does."""
    if not (p.rows and p.columns):
        return "it writes both orientations"
    if p.input_type.bytes != 2:
        return f"X is {p.dtype}; it reads 16-bit types"
    if p.align_x < tma.TMA_ALIGNMENT:
        return f"X is aligned to {p.align_x} bytes; TMA needs {tma.TMA_ALIGNMENT}"
    return None


def default(p: QuantizeProblem) -> RingConfig:
    """The fastest of those that `python -m bench quantize --device cuda --sweep` has measured."""
    return RingConfig() if p.per_byte == 1 else RingConfig(down=2, beside=1, band=2 * LINE)


class Tiles:
    """Sizes of a problem's tiles, and the workgroup's shared memory.

    band, width  rows and columns of a tile
    per          numbers of a word of codes
    group        tiles along a row whose codes leave together: a line of them, if the piece has as many"""

    def __init__(self, k: Kernel, p: QuantizeProblem, cfg: RingConfig):
        self.k, self.p, self.cfg = k, p, cfg
        self.per = 32 // p.output_type.bits
        self.band, self.width = LINE * p.per_byte, LINE // p.input_type.bytes
        self.group = min(cfg.along, LINE * p.per_byte // self.width)
        if cfg.band != self.band:
            raise ValueError(f"{cfg}: tiles of {cfg.band} rows; {self.band} fill a line of transposed codes")
        if cfg.along % self.group:
            raise ValueError(f"{cfg}: {cfg.along} tiles along a row; {self.group} fill a line of codes")
        sizes = {
            "ring": cfg.stages * self.stage_bytes,
            "rows": self.band * self.group * self.width // p.per_byte,
            "columns": 2 * self.width * LINE,
            "row scales": self.band * self.row_scales,
            "column scales": self.width * cfg.along * self.column_scales,
            "barriers": 2 * cfg.stages * barriers.BARRIER_BYTES,
        }
        self.starts, end = {}, 0
        for name, size in sizes.items():
            self.starts[name], end = end, end + size
        self.memory = k.target.dynamic_memory(k, end)
        self.full = barriers.Barriers(self.at("barriers"), cfg.stages)
        self.empty = barriers.Barriers(self.full.at(cfg.stages), cfg.stages)

    @property
    def stage_bytes(self) -> int:
        return self.band * LINE

    @property
    def row_scales(self) -> int:
        """Of a row, in a piece."""
        return self.cfg.along * self.width // BLOCK

    @property
    def column_scales(self) -> int:
        """Of a column, in a piece."""
        return self.cfg.down * self.band // BLOCK

    def at(self, name: str, more: Any = 0):
        """A pointer to a part of shared memory, or `more` bytes further on."""
        return advance(advance(self.memory, self.starts[name], i8), more, i8)

    def stage(self, number: Value) -> View:
        """A tile of X as TMA left it: 16-byte chunks of a row, permuted by its number."""
        chunk = tma.TMA_ALIGNMENT // self.p.input_type.bytes
        swizzle = Swizzle(3, chunk.bit_length() - 1, 3)
        pointer = self.at("ring", number * self.stage_bytes)
        return View(pointer, self.p.input_type, (self.band, self.width), (self.width, 1), swizzle)

    def row_shelf(self) -> View:
        """Codes of each row, in words. Where they fill lines, rows that are written together are put elsewhere in
        theirs, by the last bits of their numbers."""
        width = self.group * self.width // self.per
        swizzle = Swizzle(1, 4, 1, also=Swizzle(1, 3, 3)) if width * i32.bytes == LINE else IDENTITY
        return View(self.at("rows"), i32, (self.band, width), (width, 1), swizzle)

    def column_shelf(self, number: Value) -> View:
        """A line of codes for each column, in words; two shelves in turn. Columns two apart are written together."""
        width = LINE // i32.bytes
        pointer = self.at("columns", number * (self.width * LINE))
        return View(pointer, i32, (self.width, width), (width, 1), Swizzle(3, 2, 4))

    def board(self, name: str, rows: int, width: int) -> View:
        return View(self.at(name), u8, (rows, width), (width, 1), alignment=1)


def quantize(k: Kernel, p: QuantizeProblem, cfg: RingConfig):
    """The kernel; arguments as in arguments.py. Workgroups stay and walk through pieces, along rows first."""
    reason = why_not(p)
    if reason is not None:
        raise ValueError(f"{cfg}: {reason}. Do: take a GpuConfig")
    # limits
    names = declared(p)
    band, width = cfg.band, LINE // p.input_type.bytes
    k.tensor_maps = (TensorMap("x_map", "x", ((p.n, 1), ("m", "x_row")), (width, band), LINE),)
    k.of_target.beside = cfg.beside
    given = dict(zip(names, k.args(**names)))
    k.grid = ((Extent(p.n, width * cfg.along), Extent("m", band * cfg.down)),)
    k.grid_most = k.target.limits.compute_units * cfg.beside
    t = Tiles(k, p, cfg)
    walk = Walk(t, given["m"])

    # prologue
    bringer = k.thread.equals(2 * band)

    @k.when(bringer)
    def _():
        tma.prefetch_map(k.tensor_map("x_map"))
        t.full.init(1)
        t.empty.init(2 * band // WARP)
        barriers.fence_init()

    k.barrier()

    # the three roles
    def encode():
        k.branch(k.thread < band, lambda: encode_rows(t, walk, given), lambda: encode_columns(t, walk, given))

    k.branch(k.thread >= 2 * band, lambda: k.when(bringer)(lambda: bring(t, walk)), encode)


class Walk:
    """The pieces of this workgroup, one after the other."""

    def __init__(self, t: Tiles, m: Value):
        self.t, self.k, cfg = t, t.k, t.cfg
        up = lambda size, step: (size + (step - 1)) // step
        self.bands, self.tiles = up(m, t.band).to(i32), up(t.p.n, t.width)
        self.across = up(self.tiles, cfg.along)
        self.count = up(self.bands, cfg.down) * self.across

    def __call__(self, carry, body):
        """carry = body(row and column of the piece, its bands, its lines of codes along a row, carry) for each."""
        t, cfg = self.t, self.t.cfg

        @self.k.loop(self.k.workgroup_id(), self.count, barriers.workgroups(), carry=carry)
        def after(number, carry):
            row, column = number // self.across, number % self.across
            bands = minimum(self.bands - row * cfg.down, cfg.down)
            left = cfg.along
            if self.tiles % cfg.along:
                left = minimum(self.tiles - column * cfg.along, cfg.along)
            return body((row, column), bands, (left + (t.group - 1)) // t.group, carry)

        return after


def bring(t: Tiles, walk: Walk) -> None:
    """Tiles into the ring, as there is room. By one thread. X is read once: its lines of L2 may go first."""
    k, cfg = t.k, t.cfg

    def piece(at, bands, groups, carried):
        @k.loop(0, bands, carry=carried)
        def after(d, carried):
            @k.loop(0, groups * t.group, carry=carried)
            def after(a, carried):
                place = barriers.Position.of(carried, cfg.stages)
                t.empty.wait(place.stage, place.parity)
                t.full.expect(place.stage, t.stage_bytes)
                corner = ((at[1] * cfg.along + a) * t.width, (at[0] * cfg.down + d) * t.band)
                to, barrier = t.at("ring", place.stage * t.stage_bytes), t.full.at(place.stage)
                tma.load_box(k.tensor_map("x_map"), to, barrier, corner, "evict_first")
                return place.next().carried

            return after

        return after

    walk(barriers.Position.start(cfg.stages, 1).carried, piece)


def release(t: Tiles, stage: Value) -> None:
    """This warp has used what a stage held. (Having asked for it is not enough: TMA would overwrite what is still on
    its way to registers.)"""
    barriers.warp_barrier()
    t.k.when((t.k.thread % WARP).equals(0))(lambda: t.empty.arrive(stage))


# -- along rows: 4 threads a row of a tile, each half a block
def encode_rows(t: Tiles, walk: Walk, given: dict) -> None:
    k, p, cfg, m = t.k, t.p, t.cfg, given["m"]
    shelf, board = t.row_shelf(), t.board("row scales", t.band, t.row_scales)
    codes = matrix(given["codes"], i32, m, p.n // t.per)
    scales = matrix(given["scales"], u8, m, p.n // BLOCK)
    across, rows = t.width // EACH, t.band * EACH // t.width  # threads along a row; rows of all of them
    run = t.band // rows  # rows of a thread
    each = EACH // t.per  # words of codes a thread
    half = tma.TMA_ALIGNMENT // p.input_type.bytes  # numbers of a load
    threads = (Mode(across, 1, EACH), Mode(rows, 0, 1), OTHER)
    read = ThreadValues((t.band, t.width), threads, Mode(half, 1, 1), (Mode(EACH // half, 1, half), Mode(run, 0, rows)))
    put = ThreadValues(shelf.shape, (Mode(across, 1, each), *threads[1:]), Mode(each, 1, 1), (Mode(run, 0, rows),))
    share = BLOCK // EACH  # threads of a block
    in_blocks = (Mode(share, 1, 0), Mode(across // share, 1, 1), *threads[1:])
    one = ThreadValues(board.shape, in_blocks, Mode(1, 1, 1), (Mode(run, 0, rows),))
    take = by_lines(t, shelf.shape, WIDE)

    def tile(place, part: int, number):
        """The tile of a stage: the group's `part`-th, the piece's `number`-th along its rows."""
        t.full.wait(place.stage, place.parity)
        got = k.fragment(read).load(t.stage(place.stage))
        parts = [[got[i, r] for i in range(EACH // half)] for r in range(run)]
        size = largest_of([most_of(k, row) for row in parts])
        byte, factor, mask = scales_of(p, shared(k, size, 1, share))
        for r, row in enumerate(parts):
            found = [words(v, factor[r], p.output_type) for v in row]
            found = [f[i] & mask[r].to(i32) for f in found for i in range(f.width)]
            shelf.store(k, put.shifted(0, part * across * each), (r,), vector_of(found))
        store(k, one, board.at(0, number * (t.width // BLOCK)), [byte[r].to(u8) for r in range(run)])
        release(t, place.stage)

    def piece(at, bands, groups, carried):
        @k.loop(0, bands, carry=carried)
        def after(d, carried):
            band = at[0] * cfg.down + d

            @k.loop(0, groups, carry=carried)
            def after(g, carried):
                place = barriers.Position.of(carried, cfg.stages)
                barriers.named_barrier(ROWS_READY, t.band)  # the shelf is free, and so is the board
                for part in range(t.group):
                    tile(place, part, g * t.group + part)
                    place = place.next()
                barriers.named_barrier(ROWS_READY, t.band)
                to = codes.tile(shelf.shape, band, at[1] * (cfg.along // t.group) + g)
                k.fragment(take).store(to, k.fragment(take).load(shelf))
                return place.carried

            leave(t, scales, board, band, at[1])
            return after

        return after

    walk(barriers.Position.start(cfg.stages, 0).carried, piece)


# -- along columns: a thread two columns of a block of rows
def encode_columns(t: Tiles, walk: Walk, given: dict) -> None:
    k, p, cfg, m = t.k, t.p, t.cfg, given["m"]
    board = t.board("column scales", t.width * cfg.along, t.column_scales)
    turned = lambda name, kind, each: replace(
        matrix(given[name], kind, p.n, m // each), multiple=(p.n, BLOCK // each), stride_multiple=BLOCK // each
    )
    codes, scales = turned("codes_t", i32, t.per), turned("scales_t", u8, BLOCK)
    blocks, deep = t.band // BLOCK, BLOCK // t.per  # blocks of rows, a warp's each; words of codes of a block
    lanes, pair = Mode(WARP, 1, 2), Mode(2, 1, 1)
    # rows in two modes: those 8 apart lie at one distance for all threads
    read = ThreadValues(
        (t.band, t.width), (lanes, Mode(blocks, 0, BLOCK), OTHER), pair, (Mode(8, 0, 1), Mode(BLOCK // 8, 0, 8))
    )
    down = lambda step: (Mode(WARP, 0, 2), Mode(blocks, 1, step), OTHER)
    put = ThreadValues(
        (t.width, LINE // i32.bytes), down(deep), Mode(WIDE, 1, 1), (Mode(2, 0, 1), Mode(deep // WIDE, 1, WIDE))
    )
    one = ThreadValues(board.shape, down(1), Mode(1, 1, 1), (Mode(2, 0, 1),))
    take = by_lines(t, put.tile, WIDE)

    def tile(place, shelf: View, number, d):
        t.full.wait(place.stage, place.parity)
        got = k.fragment(read).load(t.stage(place.stage))
        column = [got[r % 8, r // 8] for r in range(BLOCK)]
        byte, factor, mask = scales_of(p, most_of(k, column))
        for c, of_column in enumerate(downwards(p, column, factor)):
            found = [w & mask[c].to(i32) for w in of_column]
            for i in range(0, deep, WIDE):
                shelf.store(k, put, (c, i // WIDE), vector_of(found[i : i + WIDE]))
        to = board.at(number * t.width, d * (t.band // BLOCK))
        store(k, one, to, [byte[c].to(u8) for c in range(2)])
        release(t, place.stage)

    def piece(at, bands, groups, carried):
        @k.loop(0, bands, carry=carried)
        def after(d, carried):
            @k.loop(0, groups * t.group, carry=carried)
            def after(a, carried):
                position, number = carried
                place, shelf = barriers.Position.of(position, cfg.stages), t.column_shelf(number)
                tile(place, shelf, a, d)
                barriers.named_barrier(COLUMNS_READY, t.band)
                to = codes.tile(take.tile, at[1] * cfg.along + a, at[0] * cfg.down + d)
                k.fragment(take).store(to, k.fragment(take).load(shelf))
                return place.next().carried, number ^ 1

            return after

        leave(t, scales, board, at[1], at[0])
        barriers.named_barrier(COLUMNS_READY, t.band)  # the board is free
        return after

    walk((barriers.Position.start(cfg.stages, 0).carried, constant(0, i32)), piece)


def downwards(p: QuantizeProblem, column: list[Value], factor: Value) -> list[list[Value]]:
    """The words of each of a block's columns, from its rows."""
    at_once = 32 // p.output_type.bits if p.per_byte == 2 else BLOCK
    found: list[list[Value]] = [[] for _ in range(factor.width or 1)]
    for first in range(0, BLOCK, at_once):
        for words_, word in zip(found, words_down(column[first : first + at_once], factor, p.output_type), strict=True):
            words_ += [word[i] for i in range(word.width or 1)]
    return found


def by_lines(t: Tiles, tile: tuple, vector: int) -> ThreadValues:
    """A tile spread over a role row by row."""
    tv = lines(*tile, t.band, vector)
    return replace(tv, threads=(*tv.threads, OTHER))


def leave(t: Tiles, scales: View, board: View, row, column) -> None:
    """The board of a piece's scales, or of a band's, to memory."""
    take = by_lines(t, board.shape, 1)
    t.k.fragment(take).store(scales.tile(board.shape, row, column), t.k.fragment(take).load(board))
