"""The workgroups of a cluster share one row: the first of them reads the others' boards where they lie.

Nothing goes through device memory, so that meeting costs a fraction of what `gpu_merge` pays for it."""

from __future__ import annotations

from collections.abc import Callable

from flykernels.lang import Value, View, constant, u32, u64
from flykernels.targets import sm90a_barriers as barriers

from .gpu_search import number, reaches
from .gpu_shared import MERGED, Shared
from .order import NOBODY, key_of


def gather(shared: Shared, visit: Callable[[Value, Value], None]) -> None:
    """visit(rank, candidate) for the row's best, by the cluster's first workgroup."""
    k, cfg, most = shared.k, shared.config, shared.most
    threads, thread, board = cfg.workgroup_size, k.thread.to(u32), shared.board

    @k.when(board.count > most)
    def _():
        shared.searches.clear()
        k.barrier()
        shared.cut()

    barriers.cluster_exchange()

    @k.when(barriers.cluster_rank().equals(0))
    def _():
        others = most * (cfg.cluster - 1)

        @k.loop(0, others, MERGED * threads, carry=(number(0), number(0)))
        def _(first, limits):
            limit, position = limits
            shared.searches.clear()
            for j in range(MERGED):
                at = first.to(u32) + thread + j * threads
                place, whose = at % most, at // most + 1

                @k.when(at < others, carry=constant(NOBODY, u64))
                def e(none):
                    count = _of(board.counter.at(0), whose, u32)

                    @k.when(place < count, carry=none)
                    def there(_):
                        return _of(board.entries.at(place), whose, u64)

                    return there

                board.add(e, reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))
            k.barrier()

            @k.when(board.count > shared.kept, carry=(limit, position))
            def cut(_):
                return shared.cut()

            k.barrier()
            return cut

        shared.finish(visit)

    barriers.cluster_exchange()  # nobody leaves while its board may still be read


def _of(here: View, workgroup: Value, dtype) -> Value:
    """What lies at this place of another workgroup's shared memory."""
    there = barriers.of_workgroup(here.pointer, workgroup)
    return View(there, dtype, (1,), (1,)).read(there, None, dtype.bytes)
