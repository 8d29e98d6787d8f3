"""Grouped GEMM on sm_90a: C[g] = A[g] B[g] for all groups in one launch, where `offs` says what belongs to which group.

As in the dense template one thread brings K tiles of A and B into a ring of shared-memory stages by TMA, and warpgroups
multiply them there with wgmma, the sums in registers; workgroups stay and walk through all groups' tiles
(`schedule.py`). A tensor map describes all groups together, so a tile at a group's end brings some of the next group's
rows too. Along M and N these only make sums that nobody stores; along K they are made zero where they lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flykernels.codeobject import Extent, TensorMap
from flykernels.dtypes import i32
from flykernels.lang import Global, Kernel, Value, constant, maximum, minimum, select
from flykernels.lang.fragment import Fragment
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets.sm90a_wgmma import SharedOperand
from templates.gemm.problem import LARGEST, GemmProblem
from templates.gemm.sm90a_config import BLOCK_M, BRINGER_REGISTERS, SWIZZLE_MOST, WARP, boxes, shared_operands
from templates.gemm.sm90a_output import Output
from templates.gemm.sm90a_ring import Stages, advance_bytes

from .arguments import declared
from .problem import RUN_TIME, GroupedGemmProblem
from .sm90a_config import GroupedSm90aConfig
from .sm90a_sums import Sums
from .sm90a_tiles import COUNTER_BYTES, Tile, Tiles

DTYPES = ("bf16", "f16")
ASKED_AHEAD = 4  # K tiles before its last one is asked for, the next tile is: about what a counter takes to answer


def why_not(p: GroupedGemmProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    if p.dtype not in DTYPES:
        return f"dtype is {p.dtype}; the sm90a kernel multiplies {' and '.join(DTYPES)}"
    if p.c != "row":
        return "C is col-major; the sm90a kernel writes rows"
    if p.form != "k" and p.k == 0:
        return "K = 0: a sum of nothing is left to ATen"
    if "any" in (p.a, p.b):
        return "an operand has no contiguous axis"
    if min(p.align_a, p.align_b) < tma.TMA_ALIGNMENT:
        return f"A is aligned to {p.align_a} bytes and B to {p.align_b}; TMA needs {tma.TMA_ALIGNMENT}"
    return None


def as_dense(p: GroupedGemmProblem, aligned: bool = True) -> GemmProblem:
    """One group's product as the dense template's parts see it: how operands lie in shared memory, how C is written.

    aligned: in form "n", whether the group begins and ends at multiples of 16 bytes of C's rows"""
    n, align = p.n, p.align_c
    if p.form == "n":  # only what it is a multiple of counts
        n, align = tma.TMA_ALIGNMENT, align if aligned else p.output_type.bytes
    return GemmProblem(n, max(1, p.k), p.dtype, p.out_dtype, p.a, p.b, align_c=align)


def grouped_gemm(k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig):
    """The kernel; arguments as `arguments.declared` says. Without any T it writes nothing, in form "k" too."""
    # limits: workgroups stay
    names: dict[str, Any] = declared(p)
    if cfg.queued:
        names["workspace"] = Global(i32, (1,))
        k.workspace = (Extent(COUNTER_BYTES),)
    k.tensor_maps, k.of_target.beside = tensor_maps(p, cfg), cfg.beside
    k.grid = ((Extent("tokens", LARGEST), Extent(k.target.limits.compute_units * cfg.beside)),)
    given = dict(zip(names, k.args(**names)))
    k.overlaps = cfg.overlap != "none"

    # layouts: stages of A and B, then shelves for C, then barriers; the table of groups
    ring = Stages(k, as_dense(p), cfg)

    # prologue: barriers and table are prepared
    first = k.thread.equals(cfg.multipliers)

    @k.when(first)
    def _():
        for t in k.tensor_maps:
            tma.prefetch_map(k.tensor_map(t.name))
        ring.prepare()
        if cfg.overlap == "early":
            barriers.let_kernels_follow()

    if k.overlaps:
        barriers.wait_for_kernels_ahead()
    tiles = Tiles(k, p, cfg, given, first)
    k.barrier()

    # main loop: the last warps bring, the others multiply and write
    def bring():
        if cfg.bringers > WARP:
            barriers.give_registers(BRINGER_REGISTERS)
        k.when(k.thread < cfg.multipliers + WARP)(lambda: produce(k, p, cfg, tiles, ring, first))

    def multiply():
        if cfg.bringers > WARP:
            barriers.take_registers(cfg.registers)
        consume(k, p, cfg, tiles, ring)

    k.branch(k.thread >= cfg.multipliers, bring, multiply)


def tensor_maps(p: GroupedGemmProblem, cfg: GroupedSm90aConfig) -> tuple[TensorMap, ...]:
    """a_map and b_map: all groups' rows (columns, K) as one axis where they are ragged, else one axis more."""
    size = {"m": p.m, "n": p.n, "k": p.k} | {RUN_TIME[p.form]: "tokens"}

    def of(name: str, shared, rows: str) -> TensorMap:
        axes = ((size["k"], 1), (size[rows], f"{name}_{'row' if name == 'a' else 'col'}"))
        if not shared.along_k:
            axes = ((size[rows], 1), (size["k"], f"{name}_{'col' if name == 'a' else 'row'}"))
        box = boxes(shared, 1).box
        if name == "a" and shared.along_k:
            box = box[0], min(BLOCK_M, box[1])
        groups = ((p.groups, f"{name}_group"),) if p.has_groups(name) else ()
        return TensorMap(f"{name}_map", name, (*axes, *groups), (*box, *(1 for _ in groups)), shared.swizzle)

    a, b = shared_operands(as_dense(p), cfg)
    maps = of("a", a, "m"), of("b", b, "n")
    if not cfg.tma_store:
        return maps
    groups = ((p.groups, "c_group"),) if p.has_groups("c") else ()
    box = (SWIZZLE_MOST // p.output_type.bytes, min(BLOCK_M, cfg.tile_m), *(1 for _ in groups))
    return *maps, TensorMap("c_map", "c", ((p.n, 1), (size["m"], "c_row"), *groups), box, SWIZZLE_MOST, 0)


def produce(k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, tiles: Tiles, ring: Stages, first) -> None:
    """Brings one K tile after the other into the ring. By one warp, whose `first` thread does it."""

    def group_of(name: str, tile: Tile):
        """The group's coordinate in an operand's tensor map, which has one only where its stride is not 0."""
        return (select(tiles.given[f"{name}_group"].equals(0), 0, tile.group),) if p.has_groups(name) else ()

    def load(name: str, start, origin, group, transfers, barrier) -> None:
        """The boxes of an operand's tile, `transfers`, at an origin (row, depth)."""
        along_k = (ring.a if name == "a" else ring.b).along_k
        for size, row, depth in transfers:
            at_row, at_depth = origin[0] + row, origin[1] + depth
            place = (at_depth, at_row) if along_k else (at_row, at_depth)
            at = (x if isinstance(x, Value) else constant(x, i32) for x in place)  # the origin of an only tile is 0
            tma.load_box(
                k.tensor_map(f"{name}_map"), advance_bytes(start, size), barrier, (*at, *group), cfg.policy(name)
            )

    blocks = blocks_of_rows(ring.a)

    def one(tile: Tile, carried):
        groups = {n: group_of(n, tile) for n in "ab"}
        some = rows_may_lack(p, cfg)
        has = minimum((tile.c.shape[0] - tile.at[0] * cfg.tile_m + (BLOCK_M - 1)) // BLOCK_M, len(blocks))
        size = ring.room.stage - (len(blocks) - has) * (ring.a.bytes // len(blocks)) if some else ring.room.stage

        def bring(first, end, carried):
            @k.loop(first, end, carry=carried)
            def after(step, carried):
                at = barriers.Position.of(carried, cfg.stages)
                ring.empty.wait(at.stage, at.parity)
                ring.full.expect(at.stage, size)
                (a, b), barrier = ring.at(at.stage), ring.full.at(at.stage)
                depth = step * cfg.tile_k + tile.k
                for number, block in enumerate(blocks):

                    @k.when(number < has if some and number else True)
                    def _(block=block):
                        load("a", a, (tile.m, depth), groups["a"], block, barrier)

                load("b", b, (tile.n, depth), groups["b"], boxes(ring.b, 1).at, barrier)
                return at.next().carried

            return after

        def all_of_it(state):
            late = maximum(tile.steps - ASKED_AHEAD, 0)
            carried = bring(0, late, state[0])
            came = tiles.ask()
            return bring(late, tile.steps, carried), came

        return k.when(first, (carried, constant(0, i32)))(all_of_it)

    tiles.find(barriers.Position.start(cfg.stages, 1).carried, one)


def rows_may_lack(p: GroupedGemmProblem, cfg: GroupedSm90aConfig) -> bool:
    """Whether a group's last tile may have no rows for some warpgroup, which then sits it out."""
    return p.form in ("m", "batch") and cfg.groups[0] > 1


def blocks_of_rows(a: SharedOperand) -> list[list[tuple[int, int, int]]]:
    """The transfers of A's tile as `Boxes.at` has them, for each 64 rows: TMA's boxes have as many at most."""
    count = max(1, a.rows // BLOCK_M)
    if not a.along_k:
        per = BLOCK_M // a.row
        return [list(boxes(a, 1).at[i * per : (i + 1) * per]) for i in range(count)]
    at = lambda i, box: (box * a.box_bytes + i * BLOCK_M * a.swizzle, i * BLOCK_M, box * a.row)
    return [[at(i, box) for box in range(a.boxes)] for i in range(count)]


def consume(k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, tiles: Tiles, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    sums, without = Sums(k, cfg, ring), replace(cfg, tma_store=False)

    def store(tile: Tile, acc: Fragment, aligned: bool) -> None:
        c = tile.c
        if p.form == "n":
            vector = tma.TMA_ALIGNMENT // c.dtype.bytes if aligned else 1
            c = replace(c, multiple=(1, vector), alignment=p.align_c if aligned else c.dtype.bytes)
        output = Output(k, as_dense(p, aligned), without, lambda name: c, tile.at, (), ring.shelf)
        if cfg.tma_store:
            output.shelf_left()
        output.store(acc, {})

    def send(tile: Tile, acc: Fragment) -> None:
        batch = (tile.group,) if p.has_groups("c") else ()
        row = tile.first if p.form == "m" else 0
        Output(k, as_dense(p), cfg, lambda name: tile.c, tile.at, batch, ring.shelf, row).store(acc, {})

    def write(tile: Tile, acc: Fragment) -> None:
        if p.form == "n":
            k.branch(tile.aligned, lambda: store(tile, acc, True), lambda: store(tile, acc, False))
        elif not cfg.tma_store:
            store(tile, acc, True)
        elif p.form != "m":
            send(tile, acc)  # rows outside a group are outside the tensor
        else:
            full = tile.c.shape[0] >= (tile.at[0] + 1) * cfg.tile_m
            k.branch(full, lambda: send(tile, acc), lambda: store(tile, acc, True))

    def one(tile: Tile, carried):
        def multiply(carried):
            at = barriers.Position.of(carried, cfg.stages)
            acc, after = (sums.ragged if p.form == "k" else sums.whole)(tile, at)
            write(tile, acc)
            return after

        if not rows_may_lack(p, cfg):
            return multiply(carried)
        begin = tile.at[0] * cfg.tile_m + sums.along[0] * (BLOCK_M * cfg.blocks)
        has = begin < tile.c.shape[0]
        after = k.when(has, carried)(multiply)
        return k.when(has.equals(0), after)(lambda carried: sums.none(tile, barriers.Position.of(carried, cfg.stages)))

    tiles.walk(barriers.Position.start(cfg.stages, 0).carried, one)
    if cfg.tma_store:
        k.when(sums.lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does
