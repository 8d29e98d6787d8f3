"""TopK on a GPU: a workgroup walks a row, or a part of one, in chunks of which each thread holds a few elements.

`floor` is the key that an element must beat: at least k elements seen so far reach it. A chunk is looked at once, with
one comparison a thread. Where more threads than needed hold something better, the floor is raised first: among the
threads' best, at least k and not many more reach the new one, so no data can flood the board. What beats the floor
goes to the board; when that is full, it is cut back to the best.

Elements come in the order of their positions, chunk by chunk, so that one equal to the floor is late: it loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i64
from flykernels.lang import Kernel, Tally, Value, View, arrive, constant, maximum, minimum, select, u32, u64
from flykernels.lang.memory import advance
from flykernels.layout import Layout

from .access import Given, vector_of, write_result
from .arguments import COUNTERS, slot_bytes
from .config import TopKConfig
from .gpu_board import Board
from .gpu_search import Searches, Threshold, number, over, reaches
from .order import ALL, Order, entry, key_of, one
from .problem import TopKProblem

MERGED = 4  # candidates of other workgroups that a thread takes up at a time


def best_of(k: Kernel, order: Order, vectors: list[Value]) -> Value:
    """The best of a thread's elements, as f32: compared as they are where the target compares pairs of that type."""
    if vectors[0].dtype not in k.target.packed_maximum:
        return reduce(order.better, [v[j].to(f32) for v in vectors for j in range(v.width or 1)])
    return reduce(order.better, vectors).fold(order.better).to(f32)


@dataclass(frozen=True)
class Sizes:
    """How many candidates there may be."""

    config: TopKConfig

    def most(self, k):
        """That a search leaves, of k wanted: the wider, the sooner it ends."""
        return k + k // 4 + 4

    def kept(self, k):
        """That lie on the board between chunks: the more, the less often it is cut."""
        return 4 * k + 192 if self.config.family == "block" else self.most(k)

    @property
    def capacity(self) -> int:
        c = self.config
        threads = min(self.most(c.most_k), c.workgroup_size)  # that add from one chunk: a search sees to it
        more = max(threads * c.elements, MERGED * c.workgroup_size if c.split else 0)
        sorted_ = 1 << (c.most_k - 1).bit_length() if c.family == "select" else 0
        return max(self.kept(c.most_k) + more, sorted_)


def topk_block(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    k.of_target.beside = cfg.resident
    given, order, sizes = Given.declare(k, p, cfg), Order(p.largest), Sizes(cfg)
    k.grid = ((Extent("rows"), *((Extent("parts"),) if cfg.split else ())),)
    width, want = given["width"].to(u32), given["k"].to(u32)
    most, kept = sizes.most(want), sizes.kept(want)
    vector, threads, thread = vector_of(p), cfg.workgroup_size, k.thread.to(u32)
    chunk = threads * cfg.elements

    # prologue: this workgroup's part of a row, [begin, end) in whole vectors, and what its threads share
    group = k.workgroup_id().to(u32)
    parts = given["parts"].to(u32) if cfg.split else 1
    row, part = (group // parts, group % parts) if cfg.split else (group, 0)
    x, values, indices = (given.row(name, row) for name in ("x", "values", "indices"))
    vectors = width // vector * vector
    begin, end = number(0), vectors
    if cfg.split:
        span = (width + (parts * chunk - 1)) // (parts * chunk) * chunk
        begin = minimum(part * span, vectors)
        end = minimum(begin + span, vectors)
    board, searches, hits = Board(k, sizes.capacity), Searches(k, 4), Tally(k, u32)
    threshold, recut = Threshold(searches[0], searches[1]), Threshold(searches[2], searches[3])
    board.empty()
    hits.clear()
    place = lambda c: (thread + c * threads) * vector  # of this thread's vector c in a chunk

    def fetch(base: Value) -> tuple[Value, ...]:
        """The chunk's vectors. Beyond the end this thread's first is read again: that changes no thread's best."""
        at = [base + place(c) for c in range(cfg.elements // vector)]
        first = select(at[0] < end, at[0], begin)
        inside = [first, *(select(a < end, a, first) for a in at[1:])]
        return tuple(x.read(a, vector if vector > 1 else None) for a in inside)

    def take(vectors: list[Value], places: list[Value], present: list[Value], floor: Value, slot: Value):
        """Considers some vectors for all threads; the new floor. slot: of the tally of hits.

        places: positions of the vectors' first elements. present: whether there is such a vector."""
        best = best_of(k, order, vectors)
        unknown = floor < 2  # fewer than k numbers so far: all count
        hit = (order.may_beat(best, order.value(floor)) | unknown) & present[0] & (floor < ALL)
        searches.clear()
        n = hits.count(hit, slot)

        def each():
            """(element as f32, position, whether it is there)"""
            for v, at, here in zip(vectors, places, present):
                for j in range(v.width or 1):
                    yield v[j].to(f32), at + j, here

        @k.when(n > 0, carry=floor)
        def floor(floor):
            def ties(limit):
                """The first of this thread's elements with that key."""
                found = number(0)
                for v, at, here in each():
                    found = maximum(found, select(order.key(v).equals(limit) & here, at ^ ALL, number(0)))
                return over([found])

            @k.when(n > most, carry=(floor, number(ALL)))
            def limits(_):
                mine = select(hit, order.key(best), number(0))
                return threshold(over([mine]), threads + 1, want, most, ties)

            limit, position = limits

            @k.when(hit)
            def _():
                bound = order.value(limit + one(position.equals(ALL)))  # equal ones are out: from the next number on
                for v, at, here in each():

                    @k.when(order.not_worse(v, bound))
                    def _():
                        key = order.key(v)
                        board.add(entry(key, at), here & reaches(key, at ^ ALL, limit, position))

            k.barrier()

            @k.when(board.count > kept, carry=limit)
            def limit(limit):
                return maximum(limit, board.cut(recut, want, most)[0])

            return limit

        return floor, hits.next_slot(slot)

    # main loop: a chunk is in registers while the next one is on its way
    k.barrier()

    @k.repeat(carry=(begin, fetch(begin), number(0), number(0)), going=lambda s: s[0] < end)
    def state(s):
        base, loaded, floor, slot = s
        following = fetch(base + chunk)
        places = [base + place(c) for c in range(len(loaded))]
        floor, slot = take(list(loaded), places, [at < end for at in places], floor, slot)
        return base + chunk, following, floor, slot

    _, _, floor, slot = state
    if vector > 1:  # the elements after the last whole vector: the last part's
        mine = vectors < width

        @k.when(mine & (part + 1).equals(parts) if cfg.split else mine)
        def _():
            at = vectors + thread
            here = at < width
            take([x.read(select(here, at, number(0)))], [at], [here], floor, slot)

    # epilogue: the board in order, to the results or to the workgroup that merges
    def finish(limit: Value, visit):
        @k.when(board.count > limit)
        def _():
            searches.clear()
            k.barrier()
            board.cut(recut, want, want if cfg.family == "select" else most)

        (board.sorted if cfg.family == "select" else board.ranked)(visit)

    few = want if cfg.family == "select" else most + most // 2  # up to here ranking costs less than a cut

    def to_results(rank, e):
        @k.when(rank < want)
        def _():
            write_result(k, order, x, values, indices, rank, e)

    if not cfg.split:
        finish(few, to_results)
        return
    merge(k, given, cfg, board, searches, recut, hits, (row, part, parts, want, kept), lambda visit: finish(few, visit), to_results)


def merge(k: Kernel, given: Given, cfg: TopKConfig, board: Board, searches: Searches, recut: Threshold, hits: Tally, numbers, finish, to_results):
    """Each workgroup leaves its k best in the workspace, all firsts before all seconds; the last one of a row takes up
    the best of them, and stops at the first batch in which nothing is good enough."""
    row, part, parts, want, kept = numbers
    k.workspace = (Extent("rows"), Extent("parts"), Extent(slot_bytes(cfg)))
    workspace, threads, thread = given["workspace"], cfg.workgroup_size, k.thread.to(u32)
    counter = View(advance(workspace.pointer, row, u32), u32, (1,), (1,))
    lists = workspace.at((row * parts).to(i64) * cfg.most_k + COUNTERS // u64.bytes)

    leave = lambda rank, e: lists.put(e, rank * parts + part)

    def to_lists(rank, e):
        @k.when(rank < want)
        def _():
            leave(rank, e)

    finish(to_lists)

    @k.loop(board.count + thread, want, threads)
    def _(rank):
        leave(rank.to(u32), constant(0, u64))

    hits.clear()
    came_before = arrive(k, counter, 0)
    board.empty()
    k.barrier()

    @k.when(came_before.equals(parts - 1))
    def _():
        @k.when(k.thread.equals(0))
        def _():
            counter.put(number(0), 0)

        nothing = number(0)

        @k.repeat(
            carry=(number(0), nothing, nothing, nothing, number(1)),
            going=lambda s: (s[0] < want * parts) & (s[4] > 0),
        )
        def _(s):
            first, limit, position, slot, _ = s
            mine, wanted = [], []
            for j in range(MERGED):
                at = first + thread + j * threads

                @k.when(at < want * parts, carry=constant(0, u64))
                def e(_):
                    return lists.get(at)

                mine.append(e)
                wanted.append(reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))
            searches.clear()
            n = hits.count(reduce(lambda a, b: a | b, wanted), slot)

            @k.when(n > 0, carry=(limit, position))
            def limits(limits):
                for e, w in zip(mine, wanted):
                    board.add(e, w)
                k.barrier()

                @k.when(board.count > kept, carry=limits)
                def cut(_):
                    return board.cut(recut, want, Sizes(cfg).most(want))

                return cut

            return first + MERGED * threads, *limits, hits.next_slot(slot), n

        finish(to_results)
