"""Several workgroups of one row: each leaves its k best in the workspace, in order, and the last to come takes up all.

They are read in batches, all firsts before all seconds: the best of all are near the beginning, and where the last one
read of each list is not good enough, nothing that follows is. But one list may hold all that is wanted. Where that is
much ("select"), no second batch is read, but blocks: the first of a block is the best of it, and as many blocks as
surely hold enough are all that is read, whatever the data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import i64
from flykernels.lang import Value, View, arrive, atomic, constant, select, u32, u64
from flykernels.lang.memory import advance
from flykernels.layout import Layout

from .arguments import COUNTERS, slot_bytes
from .config import TopKConfig
from .gpu_search import number, reaches
from .gpu_shared import MERGED, Shared, Sizes
from .order import NOBODY, key_of


def block_of(most_k: int) -> int:
    """Candidates of a block of a list: about a list's root, so that there are as many blocks as candidates in one."""
    return 1 << (most_k.bit_length() - 1) // 2


def most_parts(config: TopKConfig) -> int:
    """Of a row: the first candidates of all their blocks have room on the board."""
    return Sizes(config).capacity // -(-config.most_k // block_of(config.most_k))


def merge(
    shared: Shared, workspace: View, row: Value, part: Value, parts: Value, visit: Callable[[Value, Value], None]
) -> None:
    """visit(rank, candidate) for the row's best, by the workgroup that comes last."""
    k, cfg, want = shared.k, shared.config, shared.want
    k.workspace = (Extent("rows"), Extent("parts"), Extent(slot_bytes(cfg)))
    threads, thread, by_blocks = cfg.workgroup_size, k.thread.to(u32), cfg.family == "select"
    counter = View(advance(workspace.pointer, row, u32), u32, (1,), (1,))
    lists = workspace.at((row * parts).to(i64) * cfg.most_k + COUNTERS // u64.bytes)
    # of many candidates a list's lie side by side, of few those of equal rank
    place = lambda of, rank: of * want + rank if by_blocks else rank * parts + of
    nth = lambda i: place(i % parts, i // parts) if by_blocks else i  # of all, all firsts first

    def leave(rank, e):
        @k.when(rank < want)
        def _():
            lists.put(e, place(part, rank))

    shared.finish(leave)

    @k.loop(shared.board.count + thread, want, threads)
    def _(rank):
        leave(rank.to(u32), constant(NOBODY, u64))

    came_before = arrive(k, counter, 0)
    shared.begin()
    k.barrier()

    @k.when(came_before.equals(parts - 1))
    def _():
        @k.when(k.thread.equals(0))
        def _():
            counter.put(number(0), 0)

        if by_blocks:
            _, n, _ = take_batch(shared, lists, parts, number(0), (number(0), number(0)), number(0), nth)

            @k.when((n > 0) & (want * parts > MERGED * threads))
            def _():
                shared.board.empty()
                take_blocks(shared, lists, parts)
        else:
            take_in_turn(shared, lists, parts, nth)
        shared.finish(visit)


def read(shared: Shared, at: Value, inside: Value, memory: View) -> Value:
    """The candidate there, or nobody."""

    @shared.k.when(inside, carry=constant(NOBODY, u64))
    def e(_):
        return memory.get(at)

    return e


def take_batch(shared: Shared, lists: View, parts: Value, first: Value, bound: tuple, slot: Value, nth: Callable):
    """To the board: what of a batch is among the best. (what must be beaten from now on, how many threads have read a
    list's last that does, the tally's slot). bound: what must be beaten so far."""
    k, want, threads = shared.k, shared.want, shared.config.workgroup_size
    batch_size = MERGED * threads
    numbers = [k.thread.to(u32) + j * threads for j in range(MERGED)]  # in the batch
    batch = [read(shared, nth(first + n), first + n < want * parts, lists) for n in numbers]
    shared.searches.clear()
    for e in batch:
        shared.board.add(e, reaches(key_of(e), e.to(u32), *bound) & (key_of(e) > 0))
    k.barrier()
    count = shared.board.count  # as soon as there are enough, something is known to beat

    @k.when((count > shared.kept) | ((bound[0] < 1) & (count >= want)), carry=bound)
    def limits(_):
        return shared.cut()

    last = [(n + parts >= batch_size) & reaches(key_of(e), e.to(u32), *limits) for n, e in zip(numbers, batch)]
    return limits, shared.hits.count(reduce(lambda a, b: a | b, last), slot), shared.hits.next_slot(slot)


def take_in_turn(shared: Shared, lists: View, parts: Value, nth: Callable) -> None:
    """To the board: what is among the best, batch after batch until no list's next one can be."""
    none, batch_size = number(0), MERGED * shared.config.workgroup_size

    @shared.k.repeat(
        carry=(none, none, none, none, number(1)), going=lambda s: (s[0] < shared.want * parts) & (s[4] > 0)
    )  # number of the batch's first, what must be beaten (key, position), the tally's slot, threads with hope
    def _(s):
        first, limit, position, slot, _ = s
        limits, n, slot = take_batch(shared, lists, parts, first, (limit, position), slot, nth)
        return first + batch_size, *limits, slot, n


def take_blocks(shared: Shared, lists: View, parts: Value) -> None:
    """To the board: the blocks with the best firsts, of these what is not worse than the last such first.

    `enough` firsts are followed by `want` candidates that are not worse than the last of them: each but a list's last
    first has its whole block between itself and the next. What is better than that lies in their blocks."""
    k, cfg, want, board = shared.k, shared.config, shared.want, shared.board
    threads, thread, size = cfg.workgroup_size, k.thread.to(u32), block_of(cfg.most_k)
    firsts = (want + (size - 1)) // size * parts
    enough = (want + (size - 1) * parts + (size - 1)) // size
    blocks = k.shared(u32, Layout((cfg.most_k // size + most_parts(cfg) + 1,), (1,)))  # numbers of those to be read
    counter = k.shared(u32, Layout((1,), (1,)))

    def number_of(block: Value, i: Value | int) -> Value:
        """The place of a block's candidate i: blocks are numbered list after list's firsts, then all seconds."""
        return block % parts * want + (block // parts * size + i)

    @k.loop(0, firsts, MERGED * threads)
    def _(first):
        for j in range(MERGED):
            block = first.to(u32) + thread + j * threads

            @k.when(block < firsts)
            def _():
                board.entries.put(lists.get(number_of(block, 0)), block)

    @k.when(k.thread.equals(0))
    def _():
        counter.put(number(0), 0)

    shared.searches.clear()
    k.barrier()
    limit, position = board.threshold(shared.raised, firsts, enough, enough)

    @k.loop(thread, firsts, threads)
    def _(block):
        e = board.entries.get(block)

        @k.when(reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))
        def _():
            blocks.put(block.to(u32), atomic(k, "add", counter, number(1), 0))

    k.barrier()
    total = counter.get(0) * size
    limit = select(counter.get(0) < enough, number(NOBODY), limit)  # all there are: what follows the last counts too

    @k.repeat(carry=(number(0), limit, position), going=lambda s: s[0] < total)
    def _(s):
        first, limit, position = s
        batch = []
        for j in range(MERGED):
            at = first + thread + j * threads

            @k.when(at < total, carry=constant(NOBODY, u64))
            def e(_):
                block = blocks.get(at // size)
                inside = block // parts * size + at % size < want
                return read(shared, number_of(block, at % size), inside, lists)

            batch.append(e)
        shared.searches.clear()
        k.barrier()  # all have asked how many there are on the board
        for e in batch:
            board.add(e, reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))
        k.barrier()

        @k.when(board.count > shared.kept, carry=(limit, position))
        def limits(_):
            return shared.cut()

        return first + MERGED * threads, *limits
