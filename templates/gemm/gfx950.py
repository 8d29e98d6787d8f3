"""GEMM on gfx950: C = activation(A B + bias) + residual, a workgroup a tile, operands through LDS into matrix units.

K tiles of A and B stand in a ring of LDS stages. Where pointers and rows allow it they come by direct-to-LDS loads, 16
or 4 bytes a lane; otherwise through registers. An operand that is contiguous along K is read from LDS in vectors of 8,
one that is not by transposing reads; swizzles keep both free of bank conflicts. Tails: M and N by guarded stores, K by
zeros in the last stage. M, the batch and all strides are run-time arguments (`arguments.py`); N and K are constants.
"""

from __future__ import annotations

from collections.abc import Callable

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32
from flykernels.lang import Global, Kernel
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.plan import Plan
from flykernels.lang.ring import CopiedRing, Ring
from flykernels.lang.values import Value, maximum
from flykernels.layout import Layout
from flykernels.targets.gfx950 import BUFFER_MOST

from .arguments import declared
from .gfx950_config import TILE_MOST, Gfx950Config, direct_bytes, mma_of
from .gfx950_hti import interleaved_loop
from .gfx950_operands import matrix, operand_ring, part_of_k
from .gfx950_output import last_of_slices, slot_bytes, store
from .order import tile_of
from .problem import GemmProblem

DTYPES = ("bf16", "f16")


def why_not(p: GemmProblem, strides: dict[str, int] | None = None) -> str | None:
    """Why this template does not serve the problem, in words; None if it does.

    strides: the run-time strides of a call ("a_row": elements, ...), where the caller knows them. They have a limit:
    one tile of an operand must span less than 4 GiB."""
    if p.dtype not in DTYPES:
        return f"dtype is {p.dtype}; the gfx950 kernel multiplies {' and '.join(DTYPES)}"
    if p.packed_b:
        return "a packed B is for x86; on gfx950 operands are used where they lie"
    for name, stride in (strides or {}).items():
        if name in ("a_row", "a_col", "b_row", "b_col") and stride * TILE_MOST * p.input_type.bytes > BUFFER_MOST:
            return f"{name} is {stride}: a tile would span more than the {BUFFER_MOST} bytes that a buffer may"
    return None


def gemm(k: Kernel, p: GemmProblem, cfg: Gfx950Config):
    """The kernel; arguments as `arguments.declared` says (with split_k, `workspace` at the end), a one-dimensional grid
    of tiles x batches x slices of K in the order of `order.py`."""
    # limits: who does which tile of C, over which part of K
    names = declared(p) | ({"workspace": Global(f32, ())} if cfg.split_k > 1 else {})
    given = dict(zip(names, k.args(**names)))
    across = (Extent("m", cfg.tile_m), Extent(p.n, cfg.tile_n), *([Extent("batch")] if p.batched else []))
    k.grid = ((*across, *([Extent(cfg.split_k)] if cfg.split_k > 1 else [])),)
    if cfg.split_k > 1:
        k.workspace = (*across, Extent(slot_bytes(cfg)))
    rows, columns = tiles_of(given["m"], cfg.tile_m), tiles_of(p.n, cfg.tile_n)
    batches = given["batch"].to(i32) if p.batched else 1
    layer, row, column = tile_of(
        k.workgroup_id(), rows, columns, batches * cfg.split_k, cfg.group_m, k.target.limits.dies
    )
    layer, row, column = (k.target.uniform(x) if isinstance(x, Value) else x for x in (layer, row, column))
    batch, piece = (layer // cfg.split_k, layer % cfg.split_k) if cfg.split_k > 1 else (layer, 0)
    view = lambda name: matrix(k, p, given, name, batch)

    # layouts: rows of A and columns of B as (rows, K)
    mma = mma_of(k, p, cfg)
    a, last = part_of_k(p, cfg, view("a"), cfg.tile_m, row, piece)
    b, _ = part_of_k(p, cfg, view("b").transposed(), cfg.tile_n, column, piece)

    # prologue and main loop
    sums, rings = multiplied(k, p, cfg, mma, a, b, last)

    # epilogue
    k.afresh()  # registers are for the main loop
    shelves = shelves_of(k, p, cfg, rings)
    write = lambda sums: store(k, p, cfg, mma, sums, view, (row, column), shelves)
    if cfg.split_k == 1:
        write(sums)
    else:
        tile = (batch * rows + row) * columns + column
        last_of_slices(k, cfg, sums, given["workspace"], tile, piece, write)


def multiplied(k: Kernel, p: GemmProblem, cfg: Gfx950Config, mma: TiledMma, a, b, last=None):
    """({part of the tile: its sums}, the rings by name, whose LDS is free once all are here), of a workgroup's rows
    of A and columns of B, both (rows, K). last: of the rings, see `Ring`."""
    if cfg.interleaved:
        return interleaved_loop(k, p, cfg, mma, a, b, last)
    rings = {
        "A": operand_ring(k, p, cfg, "a", a, cfg.tile_m, last),
        "B": operand_ring(k, p, cfg, "b", b, cfg.tile_n, last),
    }
    main_loop: Callable = direct_loop if direct_bytes(p) else copied_loop
    if rings["A"].run_time:
        main_loop = direct_loop_to if direct_bytes(p) else copied_loop_to
    return {(0, 0): main_loop(k, mma, rings["A"], rings["B"])}, rings


def shelves_of(k: Kernel, p: GemmProblem, cfg: Gfx950Config, rings) -> list:
    """(LDS pointer, bytes) where parts of the tile may be put down: in what the main loop has left, or beside it."""
    if cfg.k_waves > 1:
        return [(k.shared(f32, Layout((cfg.tile_bytes(p) // f32.bytes,), (1,))).pointer, cfg.tile_bytes(p))]
    return [(r.lds.pointer, r.lds_bytes) for r in rings.values()]


def tiles_of(size, tile: int):
    """How many tiles cover `size` (an int or an i64 Value)."""
    count = (size + (tile - 1)) // tile
    return count.to(i32) if isinstance(count, Value) else count


def direct_loop(k: Kernel, mma: TiledMma, A: Ring, B: Ring) -> Fragment:
    """C's tile, with `stages - 1` K tiles on their way from memory while one is multiplied."""
    ahead, needed = A.stages - 1, lambda t: [(A, t), (B, t)]
    plan = Plan(start=-ahead, fetch=lambda t: needed(t + ahead), need=needed)
    plan.prologue()

    def tile(number, t, acc):
        """K tile t, which is `number` in the plan or one like it."""
        drain = A.ragged and isinstance(t, int)  # a cut tile mixes loads that return nothing: do not count those
        k.wait_loads(0 if drain else plan.in_flight(number))  # my part of tile t has landed
        k.barrier()  # ... everyone's has; and everyone is done with t - 1
        plan.issue(number, lambda n: t + (n - number))  # into the stage that t - 1 left
        return product(mma, A, B, t, acc)

    whole = max(0, A.tiles - ahead - A.ragged)  # steps that fetch a whole tile; a cut one is fetched with care
    assert plan.steady(1, whole)
    acc = mma.zeros()
    if whole:
        acc = k.loop(0, whole, carry=acc)(lambda t, acc: tile(0, t, acc))
    for t in range(whole, A.tiles):
        acc = tile(t, t, acc)
    return acc


def direct_loop_to(k: Kernel, mma: TiledMma, A: Ring, B: Ring) -> Fragment:
    """The same where only the run knows how deep K is; 0 gives zeros. Near K's end loads are not counted: see above."""
    ahead, needed = A.stages - 1, lambda t: [(A, t), (B, t)]
    plan = Plan(start=-ahead, fetch=lambda t: needed(t + ahead), need=needed)
    plan.prologue()
    counted = maximum(A.tile_count - (ahead + 1), 0)  # steps whose fetches are whole

    @k.loop(0, counted, carry=mma.zeros())
    def most(t, acc):
        k.wait_loads(plan.in_flight(0))
        k.barrier()
        plan.issue(0, lambda n: t + n)
        return product(mma, A, B, t, acc)

    @k.loop(counted, A.tile_count, carry=most)
    def acc(t, acc):
        k.wait_loads(0)
        k.barrier()

        @k.when(t + ahead < A.tile_count)
        def _():
            plan.issue(0, lambda n: t + n)

        return product(mma, A, B, t, acc)

    k.wait_loads(0)  # of a K of 0: no load may come later into LDS that others use
    return acc


def copied_loop_to(k: Kernel, mma: TiledMma, A: CopiedRing, B: CopiedRing) -> Fragment:
    """The same, through registers."""

    def put(t):
        vectors = A.fetch(t), B.fetch(t)
        return lambda: (A.put(t, vectors[0]), B.put(t, vectors[1]))

    put(0)()

    @k.loop(0, A.tile_count, carry=mma.zeros())
    def acc(t, acc):
        k.barrier()
        land = put(t + 1)  # zeros, past the end
        acc = product(mma, A, B, t, acc)
        land()
        return acc

    return acc


def copied_loop(k: Kernel, mma: TiledMma, A: CopiedRing, B: CopiedRing) -> Fragment:
    """C's tile, with the next K tile in registers while one is multiplied."""

    def put(t, vectors):
        A.put(t, vectors[0]), B.put(t, vectors[1])

    def tile(t, acc, more):
        k.barrier()  # tile t is there for all; and everyone is done with t - 1
        coming = (A.fetch(t + 1), B.fetch(t + 1)) if more else None
        acc = product(mma, A, B, t, acc)
        if coming:
            put(t + 1, coming)  # into the stage that t - 1 left
        return acc

    put(0, (A.fetch(0), B.fetch(0)))
    whole, acc = max(0, A.tiles - 1 - A.ragged), mma.zeros()
    if whole:
        acc = k.loop(0, whole, carry=acc)(lambda t, acc: tile(t, acc, True))
    for t in range(whole, A.tiles):
        acc = tile(t, acc, t + 1 < A.tiles)
    return acc


def product(mma: TiledMma, A, B, t, acc: Fragment) -> Fragment:
    """acc + A B over K tile t, whose stages are complete."""
    for step in range(A.steps(t, mma.depth)):
        acc = mma(A.read(mma.a, t, step), B.read(mma.b, t, step), acc)
    return acc
