"""GEMM on sm_90a for operands that TMA cannot read: addresses or strides that are not multiples of 16 bytes, or no
contiguous axis. Threads copy K tiles into shared memory, by cp.async where 4 bytes can move at once, else element by
element through registers; warps read them with ldmatrix and multiply with mma.sync. Sums are held as wgmma holds them,
so that the output is the same.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import f32, i32, i64
from flykernels.lang import Global, Kernel, Value, View, constant, maximum, minimum, select
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_mma as mma
from flykernels.targets.sm90a_wgmma import sums_layout

from .arguments import declared
from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import BLOCK_K, BLOCK_M, WARP, WARPGROUP, Image, Sm90aConfig, copied_images, copied_room
from .sm90a_output import WARP_ROWS, Output
from .sm90a_work import Piece, Work

PAIR = 2 * mma.MATRIX  # columns whose B comes with one ldmatrix


def gemm(k: Kernel, p: GemmProblem, cfg: Sm90aConfig):
    """The kernel; arguments as `arguments.declared` says (with split_k, `workspace` at the end)."""
    # limits: who does which tile of C, over which part of K
    names: dict[str, Any] = declared(p)
    work = Work(k, p, cfg)
    if work.shares:
        names["workspace"] = Global(f32, ())
    k.of_target.beside = cfg.beside
    given = dict(zip(names, k.args(**names)))
    work.begin(given)
    room, images = copied_room(p, cfg), copied_images(p, cfg)
    memory = k.target.dynamic_memory(k, room.total)
    at = lambda size: advance(memory, size // p.input_type.bytes, p.input_type)

    def piece(piece: Piece, carry):
        view = lambda name: matrix(k, p, given, name, piece.batch)
        output = Output(k, p, cfg, view, (piece.row, piece.column), (), at(room.shelves))

        # layouts: rows of A and columns of B as (rows, K), each with a ring of images in shared memory
        rings = [
            Ring(k, p, cfg, images[0], view("a"), piece.row * cfg.tile_m, at(0)),
            Ring(k, p, cfg, images[1], view("b").transposed(), piece.column * cfg.tile_n, at(room.stage)),
        ]

        # main loop, epilogue
        acc = (async_loop if images[0].chunk > 1 else copied_loop)(k, cfg, rings, piece)
        if work.shares:
            work.add_up(piece, acc, at(room.barriers), lambda acc: output.store(acc, output.fetch(0)))
        else:
            output.store(acc, output.fetch(0))
        return carry

    work.walk((), piece)


class Ring:
    """K tiles of one operand in shared memory.

    source  the operand as a (rows, K) View; origin: its first row here (an i32)
    start   pointer to the first image"""

    def __init__(self, k: Kernel, p: GemmProblem, cfg: Sm90aConfig, image: Image, source: View, origin, start):
        self.k, self.image, self.source, self.start, self.depth = k, image, source, start, p.k
        self.dtype = p.input_type
        left = source.shape[0] - origin.to(i64) if isinstance(source.shape[0], Value) else source.shape[0] - origin
        self.rows = minimum(left, image.rows).to(i32)  # that there are from `origin` on
        self.chunk = image.chunk if image.chunk > 1 else mma.MATRIX
        self.across = image.line // self.chunk  # chunks of a line
        self.lines = cfg.multipliers // self.across  # that all threads copy at a time
        self.line, self.place = k.thread // self.across, k.thread % self.across * self.chunk
        self.base = source.at(origin, 0).pointer

    @property
    def chunks(self) -> int:
        """Of an image, a thread's."""
        return self.image.lines // self.lines

    def at(self, t, i: int):
        """(row, k within the operand) of the first element of this thread's chunk i of K tile t."""
        line, place = self.line + i * self.lines, self.place
        row, k = (line, place) if self.image.along_k else (place, line)
        return row, k + t * self.image.depth

    def address(self, t, i: int, element: int = 0):
        row, k = self.at(t, i)
        row, k = (row, k + element) if self.image.along_k else (row + element, k)
        wide = lambda x, stride: x.to(i64) * stride
        return advance(self.base, wide(row, self.source.stride[0]) + wide(k, self.source.stride[1]), self.dtype)

    def slot(self, stage, i: int):
        """Where chunk i goes."""
        pitch = self.image.pitch
        to = advance(self.start, stage * self.image.elements, self.dtype)
        return advance(advance(to, self.line * pitch + self.place, self.dtype), i * self.lines * pitch, self.dtype)

    def prefetch(self, t, stage) -> None:
        """Starts to copy K tile t; what lies outside the operand becomes zeros."""
        size = self.chunk * self.dtype.bytes
        for i in range(self.chunks):
            row, k = self.at(t, i)
            here, other = (self.depth - k, row < self.rows) if self.image.along_k else (self.rows - row, k < self.depth)
            valid = minimum(maximum(here, 0), self.chunk) * self.dtype.bytes
            mma.copy_async(self.slot(stage, i), self.address(t, i), size, select(other, valid, 0))

    def fetch(self, t) -> tuple[Value, ...]:
        """K tile t in registers, a vector of 8 elements a chunk; zeros outside the operand."""
        return tuple(self._gather(t, i) for i in range(self.chunks))

    def _gather(self, t, i: int) -> Value:
        out, one = constant(0, self.dtype, mma.MATRIX), View(self.base, self.dtype, (1,), (1,))
        zero = constant(0, self.dtype)
        for e in range(mma.MATRIX):
            row, k = self.at(t, i)
            row, k = (row, k + e) if self.image.along_k else (row + e, k)
            inside = (row < self.rows) & (k < self.depth)
            pointer = select_pointer(inside, self.address(t, i, e), self.source.pointer)
            out = out.insert(e, select(inside, one.read(pointer, None, self.dtype.bytes), zero))
        return out

    def put(self, stage, vectors) -> None:
        """Writes what `fetch` returned; a barrier must follow before it is read."""
        for i, v in enumerate(vectors):
            View(self.start, self.dtype, (1,), (1,)).write(self.slot(stage, i), v, mma.MATRIX * self.dtype.bytes)

    def matrices(self, stage, row, k: int, second_down: bool) -> list[Value]:
        """ldmatrix of 16 x 16 elements from (row, k): four quarters, the second below the first or beside it."""
        lane = self.k.thread % WARP
        quarter, line = lane // mma.MATRIX, lane % mma.MATRIX
        down, deep = (quarter % 2, quarter // 2) if second_down else (quarter // 2, quarter % 2)
        pitch = self.image.pitch
        if self.image.along_k:
            at = (row + down * mma.MATRIX + line) * pitch + deep * mma.MATRIX + k
        else:
            at = (deep * mma.MATRIX + line + k) * pitch + row + down * mma.MATRIX
        image = advance(self.start, stage * self.image.elements, self.dtype)
        return mma.load_matrices(advance(image, at, self.dtype), self.dtype, not self.image.along_k)


def select_pointer(condition: Value, yes, no):
    from flykernels.mlir import arith

    return arith.select(condition.ssa, yes, no)


def async_loop(k: Kernel, cfg: Sm90aConfig, rings: list[Ring], piece: Piece) -> Fragment:
    """C's tile, with `stages - 1` K tiles on their way while one is multiplied."""
    ahead = cfg.stages - 1

    def fetch(t, stage):
        @k.when(t < piece.end)
        def _():
            for ring in rings:
                ring.prefetch(t, stage)

        mma.commit_copies()

    first = piece.first if isinstance(piece.first, Value) else constant(piece.first, i32)
    for i in range(ahead):
        fetch(first + i, i)

    @k.loop(piece.first, piece.end, carry=(zeros(k, cfg), constant(0, i32)))
    def done(t, carried):
        acc, stage = carried
        mma.wait_copies(ahead - 1)  # my part of tile t has landed
        k.barrier()  # ... everyone's has; and everyone is done with t - 1
        before = select(stage.equals(0), ahead, stage - 1)
        fetch(t + ahead, before)  # into the stage that t - 1 left
        after = stage + 1
        return product(k, cfg, rings, stage, acc), select(after.equals(cfg.stages), 0, after)

    k.barrier()
    return done[0]


def copied_loop(k: Kernel, cfg: Sm90aConfig, rings: list[Ring], piece: Piece) -> Fragment:
    """C's tile, with the next K tile in registers while one is multiplied; two stages."""
    first = piece.first if isinstance(piece.first, Value) else constant(piece.first, i32)
    for ring in rings:
        ring.put(0, ring.fetch(first))

    @k.loop(piece.first, piece.end, carry=(zeros(k, cfg), constant(0, i32)))
    def done(t, carried):
        acc, stage = carried
        k.barrier()  # tile t is there for all; and everyone is done with t - 1
        coming = [ring.fetch(t + 1) for ring in rings]
        acc = product(k, cfg, rings, stage, acc)
        for ring, vectors in zip(rings, coming):
            ring.put(stage ^ 1, vectors)  # into the stage that t - 1 left
        return acc, stage ^ 1

    k.barrier()
    return done[0]


def zeros(k: Kernel, cfg: Sm90aConfig) -> Fragment:
    return Fragment(k, sums_layout(cfg.columns, cfg.blocks, cfg.groups), False, lambda _: constant(0, f32, 2))


def product(k: Kernel, cfg: Sm90aConfig, rings: list[Ring], stage, acc: Fragment) -> Fragment:
    """acc + A B^T over the K tile in `stage`. A warp has 16 rows of each block of 64, and its group's columns."""
    group, warp = k.thread // WARPGROUP, k.thread % WARPGROUP // WARP
    row = group % cfg.groups[0] * (BLOCK_M * cfg.blocks) + warp * WARP_ROWS
    column = group // cfg.groups[0] * cfg.columns
    sums = {n: acc[n] for n in acc.names()}
    for depth in range(0, cfg.tile_k, BLOCK_K):
        a = [rings[0].matrices(stage, row + BLOCK_M * i, depth, True) for i in range(cfg.blocks)]
        for j in range(0, cfg.columns, PAIR):
            b = rings[1].matrices(stage, column + j, depth, False)
            for block in range(cfg.blocks):
                for half in range(2):
                    n = j // mma.MATRIX + half
                    old = [sums[h, n, block] for h in range(2)]
                    sums[0, n, block], sums[1, n, block] = mma.multiply(a[block], b[2 * half : 2 * half + 2], old)
    return acc.like([sums[n] for n in acc.names()])
