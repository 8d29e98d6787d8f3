"""Grouped GEMM on sm_90a: C[g] = A[g] B[g] for all groups in one launch, where `offs` says what belongs to which group.

As in the dense template one thread brings K tiles of A and B into a ring of shared-memory stages by TMA, and warpgroups
multiply them there with wgmma, the sums in registers; workgroups stay and walk through all groups' tiles
(`schedule.py`). A tensor map describes all groups together, so a tile at a group's end brings some of the next group's
rows too. Along M and N these only make sums that nobody stores; along K they are made zero where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from flykernels.codeobject import Extent, TensorMap
from flykernels.dtypes import i32, i64
from flykernels.lang import Kernel, Value, View, constant, maximum, select
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm.problem import LARGEST, GemmProblem
from templates.gemm.sm90a_config import (
    BLOCK_K,
    BLOCK_M,
    BRINGER_REGISTERS,
    SWIZZLE_MOST,
    WARP,
    boxes,
    shared_operands,
)
from templates.gemm.sm90a_output import Output
from templates.gemm.sm90a_ring import Stages, advance_bytes

from .arguments import declared
from .problem import RUN_TIME, GroupedGemmProblem
from .schedule import Schedule, turns, walk
from .sm90a_config import GroupedSm90aConfig

DTYPES = ("bf16", "f16")
CLEARED = 1  # the named barrier where warpgroups meet when they have made zeros of what lies past a group's K
UNIT = wgmma.UNIT  # bytes that are made zero together, and that a box's rows begin at a multiple of


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
    names = declared(p)
    k.tensor_maps, k.of_target.beside = tensor_maps(p, cfg), cfg.beside
    k.grid = ((Extent("tokens", LARGEST), Extent(k.target.limits.compute_units * cfg.beside)),)
    given = dict(zip(names, k.args(**names)))

    # layouts: stages of A and B, then shelves for C, then barriers; the table of groups
    ring = Stages(k, as_dense(p), cfg)

    # prologue: barriers and table are prepared
    first = k.thread.equals(cfg.multipliers)

    @k.when(first)
    def _():
        for t in k.tensor_maps:
            tma.prefetch_map(k.tensor_map(t.name))
        ring.prepare()

    tiles = Tiles(k, p, cfg, given)
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
        groups = ((p.groups, f"{name}_group"),) if p.has_groups(name) else ()
        return TensorMap(f"{name}_map", name, (*axes, *groups), (*box, *(1 for _ in groups)), shared.swizzle)

    a, b = shared_operands(as_dense(p), cfg)
    maps = of("a", a, "m"), of("b", b, "n")
    if not cfg.tma_store:
        return maps
    groups = ((p.groups, "c_group"),) if p.has_groups("c") else ()
    box = (SWIZZLE_MOST // p.output_type.bytes, min(BLOCK_M, cfg.tile_m), *(1 for _ in groups))
    return *maps, TensorMap("c_map", "c", ((p.n, 1), (size["m"], "c_row"), *groups), box, SWIZZLE_MOST, 0)


@dataclass(frozen=True)
class Tile:
    """A tile of one group's C: which, and what of A and B it is made from.

    c        the group's C as (rows, columns), which begins at `first` of T; at: number of the tile in it
    m, n, k  origin in A and B
    steps    K tiles
    before   of another group's K in the first of them (None: nothing), in form "k"
    left     in the last of them: where the group's K ends, in form "k"
    aligned  in form "n": whether the group begins and ends at multiples of 16 bytes of C's rows"""

    group: Any
    c: View
    first: Any
    at: tuple[Any, Any]
    m: Any
    n: Any
    k: Any
    steps: Any
    before: Any = None
    left: Any = None
    aligned: Any = True


class Tiles:
    """This workgroup's tiles, in the order of `schedule.Schedule`; in form "n" of that of the product turned round."""

    def __init__(self, k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, given: dict[str, Any]):
        self.k, self.p, self.cfg, self.given = k, p, cfg, given
        tokens, turned = given["tokens"].to(i32), p.form == "n"
        tile = (cfg.tile_n, cfg.tile_m) if turned else (cfg.tile_m, cfg.tile_n)
        self.unit = unit(p)
        self.schedule = Schedule(k, p.flipped if turned else p, given.get("offs"), tokens, tile, self.unit)
        self.size = {"m": p.m, "n": p.n, "k": p.k} | {RUN_TIME[p.form]: tokens}

    def walk(self, carry, body: Callable[[Tile, Any], Any]):
        """carry = body(tile, carry) for each of this workgroup's tiles. By whole warps."""
        k, tiles = self.k, self.schedule.tiles
        groups: Any = barriers.workgroups()

        @k.loop(0, turns(tiles, groups), carry=carry)
        def after(turn, carry):
            me = k.workgroup_id()
            if self.p.form == "k":  # the largest groups come first: who has the heavier tile next gets the lighter one
                me = me + turn % 2 * (groups - 1 - me - me)
            i = walk(turn, me, groups, tiles, 1)
            return k.when(i < tiles, carry)(lambda carry: body(self._tile(i), carry))

        return after

    def _tile(self, i: Value) -> Tile:
        p, cfg, form = self.p, self.cfg, self.p.form
        spot = self.schedule.spot(i, cfg.group_m)
        row, column = (spot.column, spot.row) if form == "n" else (spot.row, spot.column)
        # tiles begin at multiples of `unit`, a little before the group
        before = spot.first % self.unit if p.ragged and self.unit > 1 else None
        begin, own = spot.first, spot.size
        if before is not None:
            begin, own = begin - before, own + before
        start = dict.fromkeys("mnk", 0) | ({form: begin} if p.ragged else {})
        size = self.size | ({form: own} if p.ragged else {})

        c = replace(self.given["c"], shape=(size["m"], size["n"]), stride=(self.given["c_row"], 1))
        if p.has_groups("c"):
            c = replace(c, pointer=advance(c.pointer, spot.group.to(i64) * self.given["c_group"], c.dtype))
        else:
            c = c.at(start["m"], start["n"])
        if before is not None and form != "k":
            c = replace(c, skipped=(before, 0) if form == "m" else (0, before))
        c = replace(c, alignment=p.align_c, stride_multiple=p.align_c // c.dtype.bytes)
        steps: Any = ceil(p.k / cfg.tile_k)
        left, aligned = None, True
        if form == "k":  # at least one step, so that a group without any K gets the sum of nothing
            steps = maximum((own + (cfg.tile_k - 1)) // cfg.tile_k, 1)
            left = own - (steps - 1) * cfg.tile_k
        if form == "n":
            aligned = ((spot.first | spot.size) % (UNIT // c.dtype.bytes)).equals(0)
        at_row, at_column = row * cfg.tile_m + start["m"], column * cfg.tile_n + start["n"]
        return Tile(spot.group, c, begin, (row, column), at_row, at_column, start["k"], steps, before, left, aligned)


def unit(p: GroupedGemmProblem) -> int:
    """Elements that tiles begin at a multiple of, along the ragged axis.

    TMA brings boxes whose rows begin at multiples of 16 bytes (an illegal instruction on the H200 otherwise), so where
    tokens are neighbours in memory a tile may begin with some of the group before."""
    neighbours = {"m": p.a == "col", "n": p.b == "row", "k": p.a == "row" or p.b == "col"}
    return UNIT // p.input_type.bytes if neighbours.get(p.form) else 1


def produce(k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, tiles: Tiles, ring: Stages, first) -> None:
    """Brings one K tile after the other into the ring. By one warp, whose `first` thread does it."""
    leaves = {"a": cfg.evict == "both", "b": cfg.evict != "none"}
    hint = {n: tma.policy("evict_first" if leaves[n] else "normal") for n in "ab"}

    def group_of(name: str, tile: Tile):
        """The group's coordinate in an operand's tensor map, which has one only where its stride is not 0."""
        return (select(tiles.given[f"{name}_group"].equals(0), 0, tile.group),) if p.has_groups(name) else ()

    def load(name: str, shared, start, group, origin, at_k, barrier) -> None:
        for size, row, depth in boxes(shared, 1).at:
            at_row, at_depth = origin + row, at_k + depth
            place = (at_depth, at_row) if shared.along_k else (at_row, at_depth)
            at = (x if isinstance(x, Value) else constant(x, i32) for x in place)  # the origin of an only tile is 0
            tma.load_box(k.tensor_map(f"{name}_map"), advance_bytes(start, size), barrier, (*at, *group), hint[name])

    def one(tile: Tile, carried):
        groups = {n: group_of(n, tile) for n in "ab"}

        @k.when(first, carried)
        def after(carried):
            @k.loop(0, tile.steps, carry=carried)
            def after(step, carried):
                at = barriers.Position.of(carried, cfg.stages)
                ring.empty.wait(at.stage, at.parity)
                ring.full.expect(at.stage, ring.room.stage)
                (a, b), barrier = ring.at(at.stage), ring.full.at(at.stage)
                depth = step * cfg.tile_k + tile.k
                load("a", ring.a, a, groups["a"], tile.m, depth, barrier)
                load("b", ring.b, b, groups["b"], tile.n, depth, barrier)
                return at.next().carried

            return after

        return after

    tiles.walk(barriers.Position.start(cfg.stages, 1).carried, one)


def consume(k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, tiles: Tiles, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    A, B, full, empty = ring.a, ring.b, ring.full, ring.empty
    group = k.thread // wgmma.WARPGROUP if cfg.multipliers > wgmma.WARPGROUP else 0
    along_m, along_n = group % cfg.groups[0], group // cfg.groups[0]
    lane = k.thread % wgmma.WARPGROUP
    without = replace(cfg, tma_store=False)
    origin = wgmma.address_of(ring.memory)
    layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
    # a warpgroup's part of the tile begins at whole boxes or groups of rows: the distance is the same multiple for each
    a_start = origin + along_m * A.step_bytes(BLOCK_M * cfg.blocks, 0)
    b_start = origin + (along_n * B.step_bytes(cfg.columns, 0) + A.bytes)
    a_origin, b_origin = wgmma.descriptor(A, a_start), wgmma.descriptor(B, b_start)

    def release(stage):
        """One thread of each warpgroup says that it is done with a stage."""
        k.when(lane.equals(0))(lambda: empty.arrive(stage))

    def product(sums, stage, fresh: bool = False):
        """sums + A B^T of the K tile in `stage`, started as one group."""
        offset = (stage * (ring.room.stage // wgmma.UNIT)).to(a_origin.dtype)
        a, b, sums = a_origin + offset, b_origin + offset, list(sums)
        wgmma.fence()
        for depth in range(0, cfg.tile_k, BLOCK_K):
            for block in range(cfg.blocks):
                at_a = wgmma.moved(a, A.step_bytes(BLOCK_M * block, depth))
                at_b = wgmma.moved(b, B.step_bytes(0, depth))
                sums[block] = wgmma.multiply(at_a, at_b, sums[block], A, B, fresh and depth == 0)
        wgmma.commit()
        return tuple(sums)

    def upto(end, sums, at):
        """(sums with the K tiles before `end` added, where the next one is); `sums` has the one at `at` under way."""

        @k.loop(1, end, carry=(sums, at.next().carried, at.stage))
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, cfg.stages)
            full.wait(at.stage, at.parity)
            sums = product(sums, at.stage)
            wgmma.wait(1)
            release(before)
            return sums, at.next().carried, at.stage

        sums, after, last = done
        wgmma.wait(0)
        release(last)
        return sums, after

    def whole(tile: Tile, at):
        """Sums over a K that all groups have."""
        full.wait(at.stage, at.parity)
        return upto(tile.steps, product([wgmma.undefined(cfg.columns)] * cfg.blocks, at.stage, True), at)

    def ragged(tile: Tile, at):
        """Sums over a group's own K: what its last K tile has of another group's is cleared."""
        nothing = tuple(wgmma.zeros(cfg.columns) for _ in range(cfg.blocks))

        def cleared(stage, first, end):
            """Keeps of a K tile what lies from `first` (None: 0) up to `end` (None: all)."""
            some = [] if first is None else [first > 0]
            some += [] if end is None else [end < cfg.tile_k]

            @k.when(some[0] if len(some) == 1 else some[0] | some[1])
            def _():
                for operand, start in zip((A, B), ring.at(stage)):
                    clear(k, cfg, operand, start, first, end)
                barriers.fence_async()
                barriers.named_barrier(CLEARED, cfg.multipliers)

        def others():
            """Each K tile is done before the next is begun: with sums under way through two branches, some versions of
            ptxas wait by themselves, and say so (C7517)."""

            @k.loop(0, tile.steps - 1, carry=(nothing, at.carried))
            def done(step, carried):
                sums, now = carried
                at = barriers.Position.of(now, cfg.stages)
                full.wait(at.stage, at.parity)
                if tile.before is not None:
                    cleared(at.stage, select(step.equals(0), tile.before, 0), None)
                sums = product(sums, at.stage)
                wgmma.wait(0)
                release(at.stage)
                return sums, at.next().carried

            return done

        several = tile.steps > 1
        sums, now = others()
        last = barriers.Position.of(now, cfg.stages)
        full.wait(last.stage, last.parity)
        before = None if tile.before is None else select(several, 0, tile.before)
        cleared(last.stage, before, tile.left)
        sums = product(sums, last.stage)
        wgmma.wait(0)
        release(last.stage)
        return sums, last.next().carried

    def one(tile: Tile, carried):
        at = barriers.Position.of(carried, cfg.stages)
        sums, after = (ragged if p.form == "k" else whole)(tile, at)
        acc = wgmma.fragment(k, layout, list(sums))

        def store(aligned: bool):
            c = tile.c
            if p.form == "n":
                vector = tma.TMA_ALIGNMENT // c.dtype.bytes if aligned else 1
                c = replace(c, multiple=(1, vector), alignment=p.align_c if aligned else c.dtype.bytes)
            output = Output(k, as_dense(p, aligned), without, lambda name: c, tile.at, (), ring.shelf)
            if cfg.tma_store:
                output.shelf_left()
            output.store(acc, {})

        def send():
            batch = (tile.group,) if p.has_groups("c") else ()
            row = tile.first if p.form == "m" else 0
            Output(k, as_dense(p), cfg, lambda name: tile.c, tile.at, batch, ring.shelf, row).store(acc, {})

        if p.form == "n":
            k.branch(tile.aligned, lambda: store(True), lambda: store(False))
        elif not cfg.tma_store:
            store(True)
        elif p.form != "m":
            send()  # rows outside a group are outside the tensor
        else:
            k.branch(tile.c.shape[0] >= (tile.at[0] + 1) * cfg.tile_m, send, lambda: store(True))
        return after

    tiles.walk(barriers.Position.start(cfg.stages, 0).carried, one)
    if cfg.tma_store:
        k.when(lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does


def clear(k: Kernel, cfg: GroupedSm90aConfig, operand, start, first: Value | None, end: Value | None) -> None:
    """Makes zeros of an operand's tile in shared memory before depth `first` and from `end` on. By all warpgroups.

    Both operands are cleared: what lies there may be infinite or not a number, which 0 does not undo."""
    per = UNIT // operand.dtype.bytes
    line = operand.swizzle // UNIT  # 16-byte units of a box's row
    units = operand.bytes // UNIT
    view = View(start, operand.dtype, (units * per,), (1,))
    both = lambda conditions: conditions[0] if len(conditions) == 1 else conditions[0] | conditions[1]
    outside = lambda depth, size: both(
        ([depth < first] if first is not None else []) + ([depth + size > end] if end is not None else [])
    )
    for i in range(0, units, cfg.multipliers):
        number = k.thread + i
        at = advance(start, number * per, operand.dtype)
        some = number < units if units - i < cfg.multipliers else True
        if operand.along_k:
            row, box = number // line % operand.rows, number // (line * operand.rows)
            depth = box * operand.row + (number % line ^ row % wgmma.GROUP) * per  # as the swizzle has moved it
            reaches = outside(depth, per)
        else:
            depth = number // line % operand.depth
            reaches = outside(depth, 1)

        @k.when(reaches if some is True else reaches & some)
        def _():
            kept = constant(0, operand.dtype, per)
            if operand.along_k:  # the group may begin or end within a unit
                held, zero = view.read(at, per, UNIT), constant(0, operand.dtype)
                for e in range(per):
                    kept = kept.insert(e, select(outside(depth + e, 1), zero, held[e]))
            view.write(at, kept, UNIT)
