"""TopK on a GPU: a workgroup walks a row, or a part of one, in chunks of which each thread holds a few elements.

`floor` is the key that an element must beat: at least k elements seen so far reach it. A chunk is looked at once, with
one comparison a thread. Where more threads than needed hold something better, the floor is raised first: among the
threads' best (for large k: among all elements), at least k and not many more reach the new one, so no data can flood
the board. What beats the floor goes to the board; when that is full, it is cut back to the best.

Elements come in the order of their positions, chunk by chunk, so that one equal to the floor is late: it loses.
"""

from __future__ import annotations

from collections.abc import Callable

from flykernels.codeobject import Extent
from flykernels.dtypes import f32
from flykernels.lang import Kernel, Value, maximum, minimum, popcount, select, trailing_zeros, u32

from .access import Given, vector_of, write_result
from .config import TopKConfig
from .gpu_merge import merge
from .gpu_search import number, over, reaches
from .gpu_shared import Shared
from .order import ALL, Order, entry, one, tree
from .problem import TopKProblem


def best_of(k: Kernel, order: Order, vectors: list[Value]) -> Value:
    """The best of a thread's elements, as f32: compared as they are where the target compares pairs of that type."""
    if vectors[0].dtype not in k.target.packed_maximum:
        return tree(order.better, [v[j].to(f32) for v in vectors for j in range(v.width or 1)])
    return tree(order.better, vectors).fold(order.better).to(f32)


def topk_block(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    k.of_target.beside = cfg.resident
    given, order = Given.declare(k, p, cfg), Order.short(p.largest, p.element)
    among = (Extent("parts"),) if cfg.split else (Extent(cfg.cluster),) if cfg.cluster > 1 else ()
    k.grid, k.cluster = ((Extent("rows"), *among),), cfg.cluster
    width, want = given["width"].to(u32), given["k"].to(u32)
    vector, threads, thread = vector_of(p), cfg.workgroup_size, k.thread.to(u32)
    chunk = threads * cfg.elements

    # prologue: this workgroup's part of a row, [begin, end) in whole vectors, and what its threads share
    group = k.workgroup_id().to(u32)
    shares = cfg.split or cfg.cluster > 1
    parts = given["parts"].to(u32) if cfg.split else number(cfg.cluster)
    row, part = (group // parts, group % parts) if shares else (group, number(0))
    x, values, indices = (given.row(name, row) for name in ("x", "values", "indices"))
    vectors = width // vector * vector
    begin, end = number(0), vectors
    if shares:
        span = (width + (parts * chunk - 1)) // (parts * chunk) * chunk
        begin = minimum(part * span, vectors)
        end = minimum(begin + span, vectors)
    all_count = cfg.family == "select"  # else a thread's best speaks for it
    looked_at = (chunk if all_count else threads) + 1
    shared = Shared(k, cfg, want)
    shared.begin()
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
        unknown = floor < 2  # fewer than k numbers so far: all count
        open_ = floor < ALL >> order.spare

        def each():
            """(element as f32, position, whether it is there)"""
            for v, at, here in zip(vectors, places, present):
                for j in range(v.width or 1):
                    yield v[j].to(f32), at + j, here

        def those(wanted: Callable[[Value], Value]) -> Value:
            """A bit for each of this thread's elements that is wanted."""
            bits = [select(wanted(v) & here, number(1 << i), number(0)) for i, (v, _, here) in enumerate(each())]
            return tree(lambda a, b: a | b, bits)

        shared.searches.clear()
        if all_count:
            bound = order.value(floor)
            hits = those(lambda v: (order.may_beat(v, bound) | unknown) & open_)
            hit, n = hits > 0, shared.hits.sum(popcount(hits), slot)
            keys = lambda: [select((hits & 1 << i) > 0, order.key(v), number(0)) for i, (v, _, _) in enumerate(each())]
        else:
            best = best_of(k, order, vectors)
            hit = (order.may_beat(best, order.value(floor)) | unknown) & present[0] & open_
            n = shared.hits.count(hit, slot)
            keys = lambda: [select(hit, order.key(best), number(0))]

        @k.when(n > 0, carry=floor)
        def raised(floor):
            def ties(limit):
                """The first of this thread's elements with that key."""
                found = number(0)
                for v, at, here in each():
                    found = maximum(found, select(order.key(v).equals(limit) & here, at ^ ALL, number(0)))
                return over([found])

            @k.when(n > shared.most, carry=(floor, number(ALL)))
            def limits(_):
                return shared.raised(over(keys()), looked_at, want, shared.most, ties)

            limit, position = limits

            @k.when(hit)
            def _():
                bound = order.value(limit + one(position.equals(ALL)))  # equal ones are out: from the next number on

                @k.repeat(carry=those(lambda v: order.not_worse(v, bound)), going=lambda left: left > 0)
                def _(left):
                    i = trailing_zeros(left)  # few: they are read once more, and need no register that can be indexed
                    at = places[0] + (i // vector * threads * vector + i % vector)
                    key = order.key(x.read(at).to(f32))
                    shared.board.add(entry(key, at), reaches(key, at ^ ALL, limit, position))
                    return left & (left - 1)

            k.barrier()

            @k.when(shared.board.count > shared.kept, carry=limit)
            def higher(limit):
                return maximum(limit, shared.cut()[0])

            return higher

        return raised, shared.hits.next_slot(slot)

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

        @k.when(mine & (part + 1).equals(parts) if shares else mine)
        def _():
            at = vectors + thread
            here = at < width
            take([x.read(select(here, at, number(0)))], [at], [here], floor, slot)

    # epilogue: the board in order, to the results or to the workgroup that merges
    def to_results(rank, e):
        @k.when(rank < want)
        def _():
            write_result(k, order, x, values, indices, rank, e)

    if cfg.cluster > 1:
        from .gpu_cluster import gather

        gather(shared, to_results)
    elif cfg.split:
        merge(shared, given["workspace"], row, part, parts, to_results)
    else:
        shared.finish(to_results)
