"""Who does which tile over which K steps on sm_90a, and how workgroups that share a tile add up.

Four ways to deal out tiles: one a workgroup (or cluster), or workgroups that stay and walk; several workgroups a tile,
each with a part of K; or, see `stream_k.py`, a fixed number of workgroups that each get the same number of K steps, so
that the last round is as full as the others. Producer and multipliers walk the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i1, i8, i32, i64, u32
from flykernels.lang import Kernel, Value, View, constant, minimum, select
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers

from .order import tile_of
from .problem import LARGEST, GemmProblem
from .sm90a_config import BLOCK_M, WARP, WARPGROUP, Sm90aConfig
from .stream_k import Stream

COUNTER_BYTES = 128  # a line of L2 for each workgroup's counter, before its partial sums
ADDING = 2  # the named barrier of warpgroups that add up
VECTOR = 4  # sums of a lane that move together
WARP_ROWS = 16  # of a warpgroup's block of 64


@dataclass(frozen=True)
class Piece:
    """A part of one tile's K, for one workgroup.

    row, column, batch  of the tile
    first, end          K steps
    inside              False where the tile lies wholly outside C (the cluster's other tiles do not)
    owner               the workgroup that has the tile's first K step
    number, of          this is part `number` of so many of the tile"""

    row: Any
    column: Any
    batch: Any
    first: Any
    end: Any
    inside: Any = True
    owner: Any = 0
    number: Any = 0
    of: Any = 1


def slot_bytes(cfg: Sm90aConfig) -> int:
    """Of workspace a workgroup: a counter, and the sums of its shared pieces. The counter is 0 before and after a
    launch."""
    return COUNTER_BYTES + (2 if cfg.stream_k else 1) * tile_bytes(cfg)


def tile_bytes(cfg: Sm90aConfig) -> int:
    """Of the sums that warpgroups hold of a tile."""
    return BLOCK_M * cfg.blocks * cfg.groups[0] * cfg.tile_n * f32.bytes


class Work:
    """The pieces of this workgroup, in order. `walk` runs a function for each."""

    def __init__(self, k: Kernel, p: GemmProblem, cfg: Sm90aConfig):
        self.k, self.p, self.cfg, self.steps = k, p, cfg, cfg.steps(p)
        self.shares = (cfg.split_k > 1 and not cfg.k_cluster) or cfg.stream_k > 0
        batches = (Extent("batch"),) if p.batched else ()
        (m, n), size = cfg.cluster, cfg.cluster_size
        if cfg.stream_k:
            if_any = (Extent("m", LARGEST), *((Extent("batch", LARGEST),) if p.batched else ()))
            k.grid = ((*if_any, Extent(cfg.stream_k)),)
            k.workspace = (Extent(cfg.stream_k * slot_bytes(cfg)),)
            return
        across = (Extent("m", cfg.tile_m * m), Extent(p.n, cfg.tile_n * n), *batches)
        k.grid = ((*across, *([Extent(size * cfg.split_k)] if size * cfg.split_k > 1 else [])),)
        if self.shares:
            k.workspace = (*across, Extent(cfg.split_k * slot_bytes(cfg)))
        if cfg.persistent:
            k.grid_most = k.target.limits.compute_units * cfg.beside // size * size

    def begin(self, given: dict[str, Any]) -> None:
        """What is known once the kernel has its arguments: how many (clusters of) tiles there are."""
        cfg, p = self.cfg, self.p
        self.given = given
        count = lambda size, per: ((size + (per - 1)) // per).to(u32) if isinstance(size, Value) else -(-size // per)
        self.rows, self.columns = (
            count(given["m"], cfg.tile_m * cfg.cluster[0]),
            count(p.n, cfg.tile_n * cfg.cluster[1]),
        )
        self.batches = given["batch"].to(u32) if p.batched else 1
        self.tiles = self.rows * self.columns * self.batches
        self.group = self.k.workgroup_id().to(u32)
        self.rank = barriers.cluster_rank() if cfg.cluster_size > 1 else 0

    def walk(self, carry, body: Callable[[Piece, Any], Any]):
        """carry = body(piece, carry) for each of this workgroup's pieces."""
        cfg, k = self.cfg, self.k
        if cfg.stream_k:
            return self._stream(carry, body)
        if cfg.split_k > 1:
            return body(self._slice(), carry)
        cluster = self.group // cfg.cluster_size
        if not cfg.persistent:
            return body(self._tile(cluster, 0, self.steps), carry)
        clusters = barriers.workgroups().to(u32) // cfg.cluster_size

        @k.loop(cluster, self.tiles, clusters, carry=carry)
        def after(tile, carry):
            return body(self._tile(tile.to(u32), 0, self.steps), carry)

        return after

    def start(self) -> Piece:
        """This workgroup's first piece, if tiles are not streamed."""
        if self.cfg.split_k > 1:
            return self._slice()
        return self._tile(self.group // self.cfg.cluster_size, 0, self.steps)

    def _tile(self, tile: Value, first, end, **shared) -> Piece:
        """This workgroup's piece of (the cluster's) tile number `tile`."""
        cfg = self.cfg
        batch, row, column = tile_of(tile, self.rows, self.columns, self.batches, cfg.group_m, 1)
        as_i32 = lambda x: x.to(i32) if isinstance(x, Value) else constant(x, i32)
        row, column, batch = as_i32(row), as_i32(column), as_i32(batch) if self.p.batched else 0
        inside: Any = True
        if cfg.cluster_size > 1:
            row = row * cfg.cluster[0] + self.rank % cfg.cluster[0]
            column = column * cfg.cluster[1] + self.rank // cfg.cluster[0]
            inside = (row.to(i64) * cfg.tile_m < self.given["m"]) & (column * cfg.tile_n < self.p.n)
        return Piece(row, column, batch, first, end, inside, **shared)

    def _slice(self) -> Piece:
        """Every tile's K in `split_k` parts, whose sizes differ by one step at most."""
        split = self.cfg.split_k
        tile, number = self.group // split, self.group % split
        each, over = divmod(self.steps, split)
        start = lambda i: (i * each + minimum(i, over)).to(i32)
        return self._tile(tile, start(number), start(number + 1), owner=tile * split, number=number, of=split)

    def _stream(self, carry, body):
        stream = Stream(self.tiles, self.steps, self.cfg.stream_k)

        @self.k.loop(0, stream.count(self.group), carry=carry)
        def after(i, carry):
            s = stream.share(self.group, i.to(u32))
            shared = {"owner": s.owner, "number": s.number, "of": s.of}
            return body(self._tile(s.tile, s.first.to(i32), s.end.to(i32), **shared), carry)

        return after

    def batch_of(self, operand: str, piece: Piece):
        """The batch's coordinate in an operand's tensor map, which has one only where its stride is not 0."""
        return select(self.given[f"{operand}_batch"].equals(0), 0, piece.batch)

    # -- adding up
    def add_up(self, piece: Piece, acc: Fragment, board, then: Callable[[Fragment], None]) -> None:
        """Leaves this piece's sums in workspace; the workgroup that comes last adds all, the first K steps first, and
        goes on to `then(sums)`. Who is last is chance, what is added in which order is not. board: a pointer to 4 bytes
        of shared memory."""
        k, cfg = self.k, self.cfg
        names = acc.names()
        pairs = [(n, (1, *n[1:])) for n in names if n[0] == 0]
        sums = tuple(acc[a].shuffle(range(VECTOR), acc[b]) for a, b in pairs)
        workspace = self.given["workspace"]
        shared: Any = True if cfg.split_k > 1 else piece.of > 1

        def slot(owner):
            return advance(workspace.pointer, owner.to(i64) * slot_bytes(cfg), i8)

        def at(number, i):
            """Where the sums i of this thread of part `number` are."""
            start = advance(slot(piece.owner + number), COUNTER_BYTES, i8)
            if cfg.stream_k:  # a workgroup may begin one tile's K and end another's
                begins = select(number.equals(0), constant(tile_bytes(cfg), i32), 0)
                start = advance(start, begins, i8)
            return advance(advance(start, i * cfg.multipliers * VECTOR, f32), k.thread * VECTOR, f32)

        held = k.thread % WARPGROUP // WARP * WARP_ROWS < cfg.tile_m if cfg.tile_m < BLOCK_M else True

        def leave():
            @k.when(held)
            def _():
                for i, v in enumerate(sums):
                    workspace.write(at(piece.number, i), v, VECTOR * f32.bytes)

            k.target.publish()
            barriers.named_barrier(ADDING, cfg.multipliers)

            @k.when(k.thread.equals(0))
            def _():
                word = k.target.count_up(slot(piece.owner))
                workspace.write(board, word, i32.bytes)

            barriers.named_barrier(ADDING, cfg.multipliers)
            came = workspace_word(board)
            return came.equals(piece.of - 1 if isinstance(piece.of, int) else piece.of.to(i32) - 1)

        def total():
            k.target.observe()
            read = lambda number, i: workspace.read(at(number, i), VECTOR, VECTOR * f32.bytes)
            first = tuple(read(constant(0, u32), i) for i in range(len(sums)))

            @k.loop(1, piece.of, carry=first)
            def added(number, added):
                return tuple(v + read(number.to(u32), i) for i, v in enumerate(added))

            @k.when(k.thread.equals(0))
            def _():
                workspace.write(slot(piece.owner), constant(0, i32), i32.bytes)  # for the next launch

            return added

        def finish(vectors):
            parts = {}
            for (low, high), v in zip(pairs, vectors):
                parts[low], parts[high] = v.shuffle((0, 1)), v.shuffle((2, 3))
            then(acc.like([parts[n] for n in names]))

        if shared is True:
            k.when(leave())(lambda: finish(total()))
            return
        last = k.choose(shared, leave, constant(1, i1))
        k.when(last)(lambda: finish(k.choose(shared, total, sums)))


def workspace_word(pointer) -> Value:
    """A 32-bit word of shared memory."""
    return View(pointer, i32, (1,), (1,)).read(pointer, None, i32.bytes)
