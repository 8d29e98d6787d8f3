"""What the threads of a workgroup share while they walk a row: the board, searches, and how much is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flykernels.lang import Kernel, Tally, Value, minimum, u32

from . import gpu_sort
from .config import TopKConfig
from .gpu_board import Board
from .gpu_search import Searches, Threshold, number

MERGED = 4  # candidates of other workgroups that a thread takes up at a time


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
        c, most = self.config, self.most(self.config.most_k)
        chunk = min(most, c.workgroup_size * c.groups) * (c.elements // c.groups)  # of a chunk: a search sees to it
        more = max(chunk, MERGED * c.workgroup_size if c.split else 0)
        twice = 2 * gpu_sort.room(self.sorted, c.workgroup_size) if c.family == "select" else 0
        return max(self.kept(c.most_k) + more, twice)

    @property
    def sorted(self) -> int:
        """That are sorted at most: k is wanted of them, and no more if it is a power of two."""
        return 1 << (self.config.most_k - 1).bit_length()


class Shared:
    """Of a workgroup that looks for `want` elements.

    board      candidates
    searches   `clear()` them before a threshold is asked for, and a barrier must follow
    raised     the threshold of a chunk's bests
    hits       how many threads have something for the board"""

    def __init__(self, k: Kernel, config: TopKConfig, want: Value):
        sizes = Sizes(config)
        self.k, self.config, self.want = k, config, want
        self.most, self.kept = sizes.most(want), sizes.kept(want)
        self.board, self.searches, self.hits = Board(k, sizes.capacity), Searches(k, 4), Tally(k, u32)
        self.raised = Threshold(self.searches[0], self.searches[1])
        self._recut = Threshold(self.searches[2], self.searches[3])

    def begin(self):
        """Nothing is on the board, nothing has been counted. A barrier must follow."""
        self.board.empty()
        self.hits.clear()

    def cut(self) -> tuple[Value, Value]:
        """The board cut back to at most `most` candidates, where it holds more; (T, P) as Threshold's."""
        return self.board.cut(self._recut, self.want, self.most)

    def finish(self, visit: Callable[[Value, Value], None]) -> None:
        """visit(rank, candidate) for the best `want` candidates, and perhaps some more."""
        sort, most = self.config.family == "select", Sizes(self.config).sorted
        few = number(most) if sort else self.most + self.most // 2  # up to here ranking costs less than a cut

        @self.k.when(self.board.count > few)
        def _():
            self.searches.clear()
            self.k.barrier()
            self.board.cut(self._recut, self.want, minimum(self.most, most) if sort else self.most)

        if sort:
            gpu_sort.sort(self.board, most, visit)
        else:
            self.board.ranked(visit)
