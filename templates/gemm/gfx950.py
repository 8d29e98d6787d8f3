"""GEMM on gfx950: C = activation(A B + bias) + residual, a workgroup a tile, operands through LDS into matrix units.

K tiles of A and B stand in a ring of LDS stages. Where pointers and rows allow it they come by direct-to-LDS loads, 16
or 4 bytes a lane; otherwise through registers. An operand that is contiguous along K is read from LDS in vectors of 8,
one that is not by transposing reads; swizzles keep both free of bank conflicts. Tails: M and N by guarded stores, K by
zeros in the last stage. M, the batch and all strides are run-time arguments (`arguments.py`); N and K are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flykernels.codeobject import Extent
from flykernels.lang import Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.plan import Plan
from flykernels.lang.ring import CopiedRing, Ring
from flykernels.targets.gfx950 import BUFFER_MOST

from .arguments import declared
from .epilogue import finish
from .gfx950_config import TILE_MOST, Gfx950Config, along_k, direct_bytes, mma_of, swizzle
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
    """The kernel; arguments as `arguments.declared` says, grid (tiles of M, tiles of N, batch)."""
    # limits: who does which tile of C
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    tiles = (Extent("m", cfg.tile_m), Extent(p.n, cfg.tile_n), *([Extent("batch")] if p.batched else []))
    k.grid = tuple((e,) for e in tiles)
    row, column = k.workgroup_id(0), k.workgroup_id(1)
    view = lambda name: matrix(k, p, given, name)

    # layouts: rows of A and columns of B as (rows, K), and the rings that hold their K tiles
    mma = mma_of(k, p, cfg)
    a = view("a").tile((cfg.tile_m,), row)
    b = view("b").transposed().tile((cfg.tile_n,), column)
    A = operand_ring(k, p, cfg, "a", a, cfg.tile_m)
    B = operand_ring(k, p, cfg, "b", b, cfg.tile_n)

    # prologue and main loop
    main_loop: Callable = direct_loop if direct_bytes(p) else copied_loop
    acc = main_loop(k, mma, A, B)

    # epilogue
    c = view("c").tile((cfg.tile_m, cfg.tile_n), row, column)
    held = k.fragment(mma.d)
    bias = residual = None
    if p.bias == "row":
        bias = held.load(view("bias").tile((cfg.tile_n,), column))
    elif p.bias == "full":
        bias = k.fragment(mma.d, elementwise=True).load(view("bias").tile((cfg.tile_m, cfg.tile_n), row, column))
    if p.residual:
        residual = held.load(view("residual").tile((cfg.tile_m, cfg.tile_n), row, column))
    held.store(c, finish(acc, bias, p.activation, residual).to(p.output_type))


def matrix(k: Kernel, p: GemmProblem, given: dict, name: str) -> View:
    """An argument as (rows, columns) of this workgroup's batch, or a "row" bias as (columns,)."""
    align = {"a": p.align_a, "b": p.align_b}.get(name, p.align_c)
    view = replace(given[name], alignment=align, stride_multiple=max(1, align // given[name].dtype.bytes))
    if name == "bias" and p.bias == "row":
        return replace(view, shape=(p.n,), stride=(1,))
    if name == "bias":  # any strides: element by element
        view = replace(view, alignment=view.dtype.bytes, stride_multiple=1)
    shape = {"a": (given["m"], p.k), "b": (p.k, p.n)}.get(name, (given["m"], p.n))
    stride = (given.get(f"{name}_row", 1), given.get(f"{name}_col", 1))
    if not p.batched:
        return replace(view, shape=shape, stride=stride)
    whole = replace(view, shape=(given["batch"], *shape), stride=(given[f"{name}_batch"], *stride))
    return whole[k.workgroup_id(2)]


def operand_ring(
    k: Kernel, p: GemmProblem, cfg: Gfx950Config, which: str, source: View, rows: int
) -> Ring | CopiedRing:
    """The ring of a (rows, K) operand: its image in LDS runs along K, or across it where memory does."""
    along, direct = 1 if along_k(p, which) else 0, direct_bytes(p)
    tile = (rows, cfg.tile_k) if along else (cfg.tile_k, rows)
    moved = swizzle(cfg.atom(p), which, rows, cfg.tile_k, bool(along))
    source = source if along else source.transposed()
    if direct:
        return Ring(k, source, tile, cfg.stages, moved, direct, along)
    return CopiedRing(k, source, tile, cfg.stages, moved, along)


def direct_loop(k: Kernel, mma: TiledMma, A: Ring, B: Ring) -> Fragment:
    """C's tile, with `stages - 1` K tiles on their way from memory while one is multiplied."""
    ahead, needed = A.stages - 1, lambda t: [(A, t), (B, t)]
    plan = Plan(start=-ahead, fetch=lambda t: needed(t + ahead), need=needed)
    plan.prologue()

    def tile(number, t, acc):
        """K tile t, which is `number` in the plan or one like it."""
        k.wait_loads(plan.in_flight(number))  # my part of tile t has landed
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
