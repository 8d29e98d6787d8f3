"""TopK on a GPU: a workgroup walks a row, or a part of one, in chunks of which each thread holds a few elements.

`floor` is the key that an element must beat: at least k elements seen so far reach it. A chunk is looked at once, with
one comparison a group: a thread's elements, or some of them where k is large. Where more groups than needed hold
something better, the floor is raised first: among the groups' bests, at least k and not many more reach the new one, so
no data can flood the board. What beats the floor goes to the board; when that is full, it is cut back to the best.

Elements come in the order of their positions, chunk by chunk, so that one equal to the floor is late: it loses.
"""

from __future__ import annotations

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i16
from flykernels.lang import Kernel, Value, maximum, minimum, select, trailing_zeros, u32

from .access import Given, Kept, vector_of, write_result
from .config import TopKConfig
from .gpu_merge import merge
from .gpu_search import number, over, reaches
from .gpu_shared import Shared
from .order import ALL, Order, entry, one, tree, zip_pairs
from .problem import TopKProblem

WORD = 32  # bits of a register


def best_of(k: Kernel, order: Order, group: list[tuple]) -> Value:
    """The best of a group, as f32: compared as they are where the target compares pairs of that type. group: (vector,
    which of its elements, ...) each."""
    first = group[0][0]
    whole = len(group) % (first.width or 1) == 0
    if first.dtype not in k.target.packed_maximum or not whole:
        return tree(order.better, [v[j].to(f32) for v, j, *_ in group])
    return tree(order.better, [v for v, j, *_ in group if j == 0]).fold(order.better).to(f32)


def picked(vectors: list[Value], i: Value) -> Value:
    """Element i of all in these vectors, as f32. Registers cannot be indexed: half of them go at a time."""
    element, width = vectors[0].dtype, vectors[0].width or 1
    each = WORD // element.bits
    word = halved([v.bitcast(u32, width // each)[j] for v in vectors for j in range(width // each)], i // each)
    if each == 1:
        return word.bitcast(element)
    return (word >> (i % each * element.bits)).to(i16).bitcast(element).to(f32)


def halved(values: list[Value], i: Value) -> Value:
    """values[i], of a power of two."""
    while len(values) > 1:
        odd = (i & 1) > 0
        values, i = [select(odd, b, a) for a, b in zip_pairs(values)], i >> 1
    return values[0]


def topk_block(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    k.of_target.beside = cfg.resident
    given, order = Given.declare(k, p, cfg), Order.short(p.largest, p.element)
    k.grid = ((Extent("rows"), *((Extent("parts"),) if cfg.split else ())),)
    width, want = given["width"].to(u32), given["k"].to(u32)
    vector, threads, thread = vector_of(p), cfg.workgroup_size, k.thread.to(u32)
    chunk = threads * cfg.elements

    # prologue: this workgroup's part of a row, [begin, end) in whole vectors, and what its threads share
    group = k.workgroup_id().to(u32)
    parts = given["parts"].to(u32) if cfg.split else number(1)
    row, part = (group // parts, group % parts) if cfg.split else (group, number(0))
    rows = [given.row(name, row) for name in ("x", "values", "indices")]
    x, kept = rows[0], Kept(k, rows) if cfg.family == "select" else None
    vectors = width // vector * vector
    begin, end = number(0), vectors
    if cfg.split:
        span = (width + (parts * chunk - 1)) // (parts * chunk) * chunk
        begin = minimum(part * span, vectors)
        end = minimum(begin + span, vectors)
    nothing = select(begin < end, begin, number(0)) if cfg.split else begin  # what a part without elements reads
    size = cfg.elements // cfg.groups  # of a group
    shared = Shared(k, cfg, want)
    shared.begin()
    place = lambda c: (thread + c * threads) * vector  # of this thread's vector c in a chunk

    def fetch(base: Value) -> tuple[Value, ...]:
        """The chunk's vectors. Beyond the end the first of its group is read again: that changes no group's best."""
        at = [base + place(c) for c in range(cfg.elements // vector)]
        inside: list[Value] = []
        for c, a in enumerate(at):
            first = c * vector // size * size // vector
            inside.append(select(a < end, a, inside[first] if first < c else nothing))
        return tuple(x.read(a, vector if vector > 1 else None) for a in inside)

    def take(vectors: list[Value], places: list[Value], present: list[Value], floor: Value, slot: Value):
        """Considers some vectors for all threads; the new floor. slot: of the tally of hits.

        places: positions of the vectors' first elements. present: whether there is such a vector."""
        unknown = floor < 2  # fewer than k numbers so far: all count
        limit = order.value(floor)
        held = [(v, j, at + j, here) for v, at, here in zip(vectors, places, present) for j in range(v.width or 1)]
        grouped = [held[i : i + size] for i in range(0, len(held), size)]
        bests = [best_of(k, order, group) for group in grouped]
        better = [(order.may_beat(b, limit) | unknown) & g[0][3] for b, g in zip(bests, grouped)]
        hits = [h & (floor < ALL >> order.spare) for h in better]
        hit = tree(lambda a, b: a | b, hits)
        shared.searches.clear()
        some = tree(lambda a, b: a + b, map(one, hits))
        n = shared.hits.count(hit, slot) if len(hits) == 1 else shared.hits.sum(some, slot)

        @k.when(n > 0, carry=floor)
        def raised(floor):
            def ties(limit):
                """The first element of each group with that key."""
                tied = lambda v, j, at, here: select(order.key(v[j].to(f32)).equals(limit) & here, at ^ ALL, number(0))
                return over([tree(maximum, [tied(*e) for e in group]) for group in grouped])

            @k.when(n > shared.most, carry=(floor, number(ALL)))
            def limits(_):
                keys = [select(h, order.key(b), number(0)) for h, b in zip(hits, bests)]
                return shared.raised(over(keys), threads * cfg.groups + 1, want, shared.most, ties)

            limit, position = limits

            @k.when(hit)
            def _():
                bound = order.value(limit + one(position.equals(ALL)))  # equal ones are out: from the next number on
                chosen = [order.not_worse(v[j].to(f32), bound) & here for v, j, _, here in held]
                bits = [select(c, number(1 << i), number(0)) for i, c in enumerate(chosen)]

                @k.repeat(carry=tree(lambda a, b: a | b, bits), going=lambda left: left > 0)
                def _(left):
                    i = trailing_zeros(left)
                    at = places[0] + (i // vector * threads * vector + i % vector)
                    again = vector == 1 or len(held) == 1 or k.target.rereads  # or out of registers
                    key = order.key(x.read(at).to(f32) if again else picked(vectors, i))
                    shared.board.add(entry(key, at), reaches(key, at ^ ALL, limit, position))
                    return left & (left - 1)

            k.barrier()

            @k.when(shared.board.count > shared.kept, carry=limit)
            def higher(limit):
                return maximum(limit, shared.cut()[0])

            return higher

        return raised, shared.hits.next_slot(slot)

    def take_chunk(base: Value, loaded: tuple[Value, ...], floor: Value, slot: Value):
        places = [base + place(c) for c in range(len(loaded))]
        return take(list(loaded), places, [at < end for at in places], floor, slot)

    # main loop: a chunk is in registers while the next one is on its way; or there is but one
    first = fetch(begin)
    k.barrier()
    if cfg.most_width:
        floor, slot = take_chunk(begin, first, number(0), number(0))
    else:

        @k.repeat(carry=(begin, first, number(0), number(0)), going=lambda s: s[0] < end)
        def state(s):
            base, loaded, floor, slot = s
            following = fetch(base + chunk)
            return base + chunk, following, *take_chunk(base, loaded, floor, slot)

        _, _, floor, slot = state
    if vector > 1:  # the elements after the last whole vector: the last part's
        mine = vectors < width

        @k.when(mine & (part + 1).equals(parts) if cfg.split else mine)
        def _():
            at = vectors + thread
            here = at < width
            take([x.read(select(here, at, number(0)))], [at], [here], floor, slot)

    # epilogue: the board in order, to the results or to the workgroup that merges
    def to_results(rank, e):
        @k.when(rank < want)
        def _():
            source, values, indices = kept.back() if kept else rows
            write_result(k, order, source, values, indices, rank, e)

    if cfg.split:
        merge(shared, given["workspace"], row, part, parts, to_results)
    else:
        shared.finish(to_results)
