"""Several workgroups of one row: each leaves its k best in the workspace, and the last to come takes up all.

The lists lie side by side, all firsts before all seconds: the best of all are near the beginning, and the first batch
in which nothing is good enough is the last that is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import i64
from flykernels.lang import Value, View, arrive, constant, u32, u64
from flykernels.lang.memory import advance

from .arguments import COUNTERS, slot_bytes
from .gpu_search import number, reaches
from .gpu_shared import MERGED, Shared
from .order import NOBODY, key_of


def merge(
    shared: Shared, workspace: View, row: Value, part: Value, parts: Value, visit: Callable[[Value, Value], None]
) -> None:
    """visit(rank, candidate) for the row's best, by the workgroup that comes last."""
    k, cfg, want = shared.k, shared.config, shared.want
    k.workspace = (Extent("rows"), Extent("parts"), Extent(slot_bytes(cfg)))
    threads, thread = cfg.workgroup_size, k.thread.to(u32)
    counter = View(advance(workspace.pointer, row, u32), u32, (1,), (1,))
    lists = workspace.at((row * parts).to(i64) * cfg.most_k + COUNTERS // u64.bytes)

    def leave(rank, e):
        @k.when(rank < want)
        def _():
            lists.put(e, rank * parts + part)

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

        none = number(0)

        @k.repeat(
            carry=(none, none, none, none, number(1)), going=lambda s: (s[0] < want * parts) & (s[4] > 0)
        )  # number of the batch's first, what must be beaten (key, position), the tally's slot, threads with something
        def _(s):
            first, limit, position, slot, _ = s
            batch, wanted = [], []
            for j in range(MERGED):
                at = first + thread + j * threads

                @k.when(at < want * parts, carry=constant(NOBODY, u64))
                def e(_):
                    return lists.get(at)

                batch.append(e)
                wanted.append(reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))
            shared.searches.clear()
            n = shared.hits.count(reduce(lambda a, b: a | b, wanted), slot)

            @k.when(n > 0, carry=(limit, position))
            def limits(limits):
                for e, w in zip(batch, wanted):
                    shared.board.add(e, w)
                k.barrier()

                count = shared.board.count  # as soon as there are enough, something is known to beat

                @k.when((count > shared.kept) | ((limit < 1) & (count >= want)), carry=limits)
                def cut(_):
                    return shared.cut()

                return cut

            return first + MERGED * threads, *limits, shared.hits.next_slot(slot), n

        shared.finish(visit)
