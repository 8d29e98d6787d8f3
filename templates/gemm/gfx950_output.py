"""From sums in registers to C on gfx950: workgroups and waves that share a tile add up, then bias, activation, stores.

Matrix units leave 4 columns of a row in each lane. Where C has 16-bit elements and allows 16-byte stores, the tile is
turned round in LDS that the main loop has left; sums that several waves hold meet there too, in f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from flykernels.dtypes import f32, i32, i64
from flykernels.lang import Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.memory import advance
from flykernels.layout import Layout, ThreadValues

from .epilogue import finish
from .gfx950_config import Gfx950Config, by_rows, shelf_swizzle
from .problem import GemmProblem

WIDE = 16  # bytes: the widest store
MASKS_MOST = 16  # 32 scalar registers
COUNTER_BYTES = 128  # a cache line for each tile's counter, before its partial sums


def slot_bytes(cfg: Gfx950Config) -> int:
    """Of workspace a tile of C: a counter, and every slice's sums. The counter is 0 before and after a launch."""
    return COUNTER_BYTES + cfg.split_k * cfg.k_waves * cfg.tile_m * cfg.tile_n * f32.bytes


def store(k: Kernel, p: GemmProblem, cfg: Gfx950Config, mma: TiledMma, sums: Mapping, view, at, shelves):
    """Writes the workgroup's tile.

    sums     {(i, j): Fragment of mma.d}, the parts of the tile
    view     name -> the argument as a View of this batch
    at       (row, column) of the tile
    shelves  LDS pointers and bytes that are free, one a part"""
    row, column = at
    tiles = {
        n: view(n).tile((cfg.tile_m, cfg.tile_n), row, column) for n in ("c", "residual") if n == "c" or p.residual
    }
    if p.bias != "none":
        size, where = ((cfg.tile_n,), (column,)) if p.bias == "row" else ((cfg.tile_m, cfg.tile_n), (row, column))
        tiles["bias"] = view("bias").tile(size, *where)
    alone = not isinstance(tiles["c"].stride[1], int)  # rows of C have no neighbours: element by element
    place = lambda tv, part: tv.shifted(*(i * n for i, n in zip(part, cfg.part)))

    def finished(part, held, acc: Fragment) -> Fragment:
        tv = place(held, part)
        bias = k.fragment(tv, elementwise=p.bias == "full").load(tiles["bias"]) if "bias" in tiles else None
        residual = k.fragment(tv).load(tiles["residual"]) if "residual" in tiles else None
        return finish(acc, bias, p.activation, residual).to(p.output_type)

    held = mma.d
    if cfg.k_waves > 1:
        held = by_rows(cfg.part, cfg.workgroup_size, 4)
        sums = {part: added(k, cfg, mma, acc, held, shelves[i][0]) for i, (part, acc) in enumerate(sums.items())}
    taken = turned(p, cfg)
    if taken is None or any(size < cfg.part[0] * cfg.part[1] * p.output_type.bytes for _, size in shelves[: len(sums)]):
        for part, acc in sums.items():
            for band, values in bands(p, held, acc):
                values = finished(part, band, values)
                k.afresh()  # no mask is kept from loading to storing
                k.fragment(place(band, part), elementwise=alone).store(tiles["c"], values)
                k.target.pin()
        return
    out = {part: finished(part, held, acc) for part, acc in sums.items()}
    swizzle = shelf_swizzle(held, taken)
    layout = Layout.compact(*cfg.part)
    shelf = [View(pointer, p.output_type, layout.shape, layout.stride, swizzle) for pointer, _ in shelves]
    k.barrier()  # the last K tile has been read by all
    for i, values in enumerate(out.values()):
        k.fragment(held).store(shelf[i], values)
    k.barrier()
    for i, part in enumerate(out):
        values = k.fragment(taken).load(shelf[i])
        k.fragment(place(taken, part)).store(tiles["c"], values)


def bands(p: GemmProblem, held: ThreadValues, acc: Fragment):
    """(layout, sums) of the bands of a part's rows, or of less, that leave each few enough masks.

    Whether an element lies inside C is a mask of 64 bits in scalar registers, of which a wave has some hundred; where N
    is not whole vectors each element has its own."""
    alone = p.n % held.vector.size or p.bias == "full"
    masks = prod(held.piece_sizes) * (held.vector.size if alone else 1)
    cuts = sorted((m.axis, -m.size, n) for n, m in enumerate(held.pieces) if m.size > 1)
    if masks <= MASKS_MOST or not cuts:
        yield held, acc
        return
    n = cuts[0][-1]
    for i in range(held.pieces[n].size):
        mode = held.pieces[n]._replace(size=1)
        by = [i * mode.step if axis == mode.axis else 0 for axis in range(2)]
        one = replace(held.shifted(*by), pieces=(*held.pieces[:n], mode, *held.pieces[n + 1 :]))
        yield from bands(p, one, Fragment(acc.k, one, False, lambda d, i=i: acc[(*d[:n], i, *d[n + 1 :])]))


def turned(p: GemmProblem, cfg: Gfx950Config):
    """Who stores what once a part has been turned round in LDS; None where stores are as wide without."""
    vector = WIDE // p.output_type.bytes
    threads, (rows, columns) = cfg.workgroup_size, cfg.part
    if cfg.k_waves > 1 or p.output_type.bytes != 2 or p.align_c < WIDE or p.n % vector or columns < 2 * vector:
        return None
    return by_rows(cfg.part, threads, vector) if rows * columns % (vector * threads) == 0 else None


def added(k: Kernel, cfg: Gfx950Config, mma: TiledMma, acc: Fragment, out, pointer) -> Fragment:
    """The sums of all k_waves, as `out` lays them over all threads; always added in the same order."""
    layout = Layout.compact(cfg.k_waves, *cfg.part)
    whole = View(pointer, f32, layout.shape, layout.stride)
    k.barrier()  # the last K tile has been read by all
    mine = whole[k.subgroup // (cfg.waves[0] * cfg.waves[1])]
    k.fragment(mma.d).store(mine, acc)
    k.barrier()
    parts = [k.fragment(out).load(whole[i]) for i in range(cfg.k_waves)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def last_of_slices(k: Kernel, cfg: Gfx950Config, sums: Mapping, workspace: View, tile, piece, then):
    """Leaves this slice's sums in workspace; the workgroup that comes last adds all slices', 0 first, and goes on to
    `then(sums)`. Who is last is chance, what is added in which order is not. tile: its number; piece: the slice's."""
    slot = advance(workspace.pointer, tile.to(i64) * (slot_bytes(cfg) // f32.bytes), f32)
    vectors = [v for acc in sums.values() for v in acc.values()]
    width = vectors[0].width
    each = cfg.workgroup_size * width  # elements of one vector of all threads
    at = lambda s, i: advance(
        advance(slot, (s * len(vectors) + i) * each + COUNTER_BYTES // f32.bytes, f32), k.thread * width, f32
    )
    for i, v in enumerate(vectors):
        workspace.write(at(piece, i), v, WIDE)
    k.target.publish()
    k.barrier()  # all threads' sums are published
    board = k.shared(i32, Layout((1,), (1,)))

    @k.when(k.thread.equals(0))
    def _():
        board.write(board.pointer, k.target.count_up(slot), i32.bytes)

    k.barrier()

    @k.when(k.target.uniform(board.read(board.pointer, None, i32.bytes)).equals(cfg.split_k - 1))
    def _():
        k.target.observe()
        first = tuple(workspace.read(at(0, i), width, WIDE) for i in range(len(vectors)))

        @k.loop(1, cfg.split_k, carry=first)
        def total(s, total):
            return tuple(t + workspace.read(at(s, i), width, WIDE) for i, t in enumerate(total))

        @k.when(k.thread.equals(0))
        def _():
            k.target.count_up(slot, -cfg.split_k)  # for the next launch

        parts, start = {}, 0
        for part, acc in sums.items():
            n = len(acc.values())
            parts[part], start = acc.like(total[start : start + n]), start + n
        then(parts)
