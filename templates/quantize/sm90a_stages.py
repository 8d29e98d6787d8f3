"""X on its way into shared memory on sm_90a: whole tiles ahead of their use, by cp.async.

Loads into registers the assembler moves down to where it has registers free for them, near their use. Copies hold none,
and so they are under way from where they are started. A thread reads only what it has copied itself: no barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

from flykernels.dtypes import i8, i32
from flykernels.lang import Kernel, ThreadValues, View, constant, select
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.lang.values import Value
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_mma as mma

from .problem import QuantizeProblem

CHUNK = 16  # bytes: the most that one copy moves, past L1


def why_not(p: QuantizeProblem) -> str | None:
    """Why X cannot come so, in words; None if it can."""
    if p.input_type.bytes != 2 or p.align_x < CHUNK:
        return f"X is {p.dtype} aligned to {p.align_x} bytes; copies move {CHUNK}, 8 numbers of a 16-bit type"
    return None


class Stages:
    """Tiles of X in shared memory, `count` at a time. held: who has which numbers of a tile, 16 bytes a piece."""

    def __init__(self, k: Kernel, x: View, held: ThreadValues, count: int, memory):
        self.k, self.x, self.held, self.count, self.memory = k, x, held, count, memory

    @staticmethod
    def size(held: ThreadValues, count: int) -> int:
        """Bytes."""
        return count * held.piece_sizes[0] * held.thread_count * CHUNK

    def bring(self, number: Any, row, column, wanted) -> None:
        """Starts to copy the tile at (row, column), the workgroup's `number`-th, where it is wanted; zeros for what
        lies outside X. One group of copies either way."""
        view, (rows, columns) = self.x.tile(self.held.tile, row, column), self.held.tile
        first_row, first_column = self.held.origin(self.k.thread)
        pieces = range(self.held.piece_sizes[0])

        def whole():
            """Each piece is a row below the one before: no more than an addition."""
            at = view.at(first_row, first_column).pointer
            for piece in pieces:
                mma.copy_async(self._place(number, piece), at, CHUNK)
                at = advance(at, view.stride[0], view.dtype)

        def cut():
            for piece in pieces:
                at = first_row + self.held.walk((piece,))[0]
                inside = (at < view.shape[0]) & (first_column < view.shape[1])
                source = select(inside, constant(1, i32), 0)
                here = view.at(at * source, first_column * source).pointer
                mma.copy_async(self._place(number, piece), here, CHUNK, source * CHUNK)

        def copy():
            left = (x >= n for x, n in zip(view.shape, (rows, columns)) if isinstance(x, Value) or x < n)
            self.k.branch(reduce(and_, left), whole, cut)

        self.k.when(wanted)(copy)
        mma.commit_copies()

    def take(self, number: Any) -> Fragment:
        """The workgroup's `number`-th tile, once this thread's part of it has landed."""
        mma.wait_copies(self.count - 1)
        dtype, each = self.x.dtype, CHUNK // self.x.dtype.bytes

        def piece(digits) -> Value:
            view = View(self._place(number, digits[0]), dtype, (each,), (1,), alignment=CHUNK)
            return view.read(view.pointer, each, CHUNK)

        return Fragment(self.k, self.held, False, piece)

    def _place(self, number: Any, piece: int):
        """Neighbours of a warp in neighbouring places: no two on one bank at a time."""
        slot = number % self.count
        at = ((slot * self.held.piece_sizes[0] + piece) * self.held.thread_count + self.k.thread) * CHUNK
        return advance(self.memory, at if isinstance(at, int) else at.to(i32), i8)


def walk(k: Kernel, stages: Stages, strip: int, tiles: int, down, tile: Callable, leave: Callable) -> None:
    """Workgroups that stay: each does strips of `strip` tiles, one of so many after the other, and copies the tiles to
    come whatever strip they are of.

    tiles, down  tiles of a row, and of a column
    tile         (number, (row, column), values, what to do once all of it has come): encodes the workgroup's
                 `number`-th tile, with a barrier
    leave        (row, strip, board): when a strip's last tile has been encoded"""
    strips, first, others = -(-tiles // strip), k.workgroup_id(), barriers.workgroups()
    mine = (strips * down - first + (others - 1)) // others * strip

    def where(number):
        """(row, strip, column) of the workgroup's `number`-th tile."""
        at = first + number // strip * others
        row, column = at // strips, at % strips
        return row, column, column * strip + number % strip

    def bring(number):
        row, _, column = where(number)
        stages.bring(number, row, column, (number < mine) & (column < tiles))

    for number in range(stages.count):
        bring(constant(number, i32))

    @k.loop(0, mine)
    def _(number):
        row, of_row, column = where(number)

        def encode():
            tile(number, (row, column), stages.take(number), lambda: bring(number + stages.count))

        if tiles % strip == 0:
            encode()
        else:  # the last strip of a row may be short
            inside = column < tiles
            k.branch(inside, encode, lambda: bring(number + stages.count))

        @k.when((number % strip).equals(strip - 1))
        def _():
            leave(row, of_row, number // strip % 2)
