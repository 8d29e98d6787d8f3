"""TopK on a CPU: a thread walks a row, or a part of one, and compares whole blocks with the worst that still counts.

Once k elements are known, what comes later must be better than the worst of them: an equal one loses. What is goes to
the board; when that is full, it is cut back to the best, and the bound rises. On random data hardly anything passes; on
the worst (ascending) everything does, and costs its share of a cut. For small k a first bound is taken from the row's
beginning, so that short rows need no cut at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from flykernels.codeobject import Extent
from flykernels.dtypes import i32, i64
from flykernels.lang import Kernel, Value, View, atomic, constant, lanes_mask, minimum, select, u32, u64
from flykernels.lang.memory import advance

from .access import Given, Row, put_result
from .arguments import COUNTERS
from .config import TopKConfig
from .order import Order, entry, key_of, one, position_of
from .problem import TopKProblem
from .x86_board import COUNT_MOST, Board, lane_numbers, number

GROUPS = 4  # vectors of groups' bests, from which the first bound is taken
PRIMED = 32  # elements of such a group at most
BLOCK = 8  # vectors that are looked at before one branch
PRIMED_K = 128  # class of k for whose rows it may pay
GATHERED = 1024  # elements of a row with strides that are brought together at a time


def most_left(k):
    """Candidates that a cut leaves, of k wanted: the wider, the sooner its search ends."""
    return k + k // 4 + 4


def kept(k):
    """Candidates that the board holds before it is cut."""
    return 4 * k + 192


@dataclass
class Scan:
    """The walk over a row. Its state: how many candidates there are, and the bound others must not be worse than."""

    k: Kernel
    order: Order
    board: Board
    want: Value

    @property
    def lanes(self) -> int:
        return self.board.lanes

    def vector(self, row: Row, i: Value) -> Value:
        """Neighbours from element i on, as what they are compared as."""
        return row.view.read(row.pointer(i), self.lanes, row.view.dtype.bytes).to(self.order.number)

    def start(self):
        """Nothing is known."""
        return number(0), self.order.unbounded

    def cut_if_full(self, state):
        """After at most a block has been added."""

        @self.k.when(state[0] > kept(self.want), carry=state)
        def cut(s):
            left, limit = self.board.cut(s[0], self.want, most_left(self.want))
            return left, self.order.above(limit)

        return cut

    def primed(self, row: Row, begin: Value, end: Value):
        """A first bound: the k-th of the bests of some groups, which at least k elements reach. Not for large k."""
        k, n, order = self.k, self.lanes, self.order
        vector = lambda i: self.vector(row, begin + i)
        looked_at = minimum(end - begin, PRIMED * GROUPS * n) // (GROUPS * n) * (GROUPS * n)

        @k.when((self.want + self.want // 2 <= GROUPS * n) & (looked_at > 0), carry=self.start()[1])
        def bound(_):
            @k.loop(
                GROUPS * n, looked_at.to(i32), GROUPS * n, carry=tuple(vector(number(j * n)) for j in range(GROUPS))
            )
            def best(i, best):
                found = [vector(i.to(u32) + j * n) for j in range(GROUPS)]
                return tuple(select((x > b) if order.largest else (x < b), x, b) for x, b in zip(found, best))

            for j, b in enumerate(best):
                self.board.keys.put(order.key(b), number(j * n))
            return order.value(self.board.threshold(number(GROUPS * n), self.want, most_left(self.want))[0])

        return number(0), bound

    def over(self, row: Row, begin: Value, end: Value, state, offset=0):
        """Elements begin <= i < end of a contiguous row; position offset + i."""
        k, n = self.k, self.lanes
        lanes = lane_numbers(n)
        vector = lambda i: self.vector(row, i)
        whole = begin + (end - begin) // (BLOCK * n) * (BLOCK * n)
        vectors = whole + (end - whole) // n * n

        def add(i: Value, bound: Value, count: Value) -> Value:
            """A vector's elements that are not worse than the bound; the new count."""
            x = vector(i)
            chosen = lanes_mask(self.order.not_worse(x, bound))
            return self.board.add(count, self.order.key(x), lanes + (i + offset), chosen)

        @k.loop(begin.to(i32), whole.to(i32), BLOCK * n, carry=state)
        def blocks(i, s):
            i = i.to(u32)
            hits = self.order.not_worse(vector(i), s[1])
            for j in range(1, BLOCK):
                hits = hits | self.order.not_worse(vector(i + j * n), s[1])

            @k.when(lanes_mask(hits) > 0, carry=s)
            def after(s):
                @k.loop(0, BLOCK * n, n, carry=s[0])
                def count(j, count):
                    return add(i + j.to(u32), s[1], count)

                return self.cut_if_full((count, s[1]))

            return after

        @k.loop(whole.to(i32), vectors.to(i32), n, carry=blocks)
        def rest(i, s):
            return add(i.to(u32), s[1], s[0]), s[1]

        @k.loop(vectors.to(i32), end.to(i32), carry=self.cut_if_full(rest))
        def last(i, s):
            x = row.read(i.to(u32)).to(self.order.number)
            self.board.put(s[0], self.order.key(x), i.to(u32) + offset)
            return s[0] + one(self.order.not_worse(x, s[1])), s[1]

        return self.cut_if_full(last)

    def gathered(self, row: Row, begin: Value, end: Value, state, prime: bool = False):
        """The same of a row with strides. prime: the first bound is taken from what is brought together first."""
        k, element = self.k, self.order.number
        buffer = k.private(element, GATHERED)
        near = Row(buffer, 1, element.bytes)

        @k.loop(begin.to(i32), end.to(i32), GATHERED, carry=state)
        def after(first, s):
            first = first.to(u32)
            count = minimum(end - first, GATHERED)

            @k.loop(0, count.to(i32))
            def _(i):
                buffer.put(row.read(first + i.to(u32)).to(element), i)

            @k.when(first.equals(begin) if prime else False, carry=s)
            def bounded(_):
                return self.primed(near, number(0), count)

            return self.over(near, number(0), count, bounded, first)

        return after


def topk_scan(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    given, order = Given.declare(k, p, cfg), Order.of(p.largest, p.element)
    k.grid = ((Extent("rows"), *((Extent("parts"),) if cfg.split else ())),)
    width, want = given["width"].to(u32), given["k"].to(u32)
    lanes = k.target.vector_bytes // u32.bytes
    room = kept(cfg.most_k) + BLOCK * lanes
    board = Board.make(k, room, order.keys)
    scan = Scan(k, order, board, want)

    # prologue: this workgroup's part of a row
    group = k.workgroup_id().to(u32)
    parts = given["parts"].to(u32) if cfg.split else 1
    row, part = (group // parts, group % parts) if cfg.split else (group, 0)
    x, values, indices = (given.row(name, row) for name in ("x", "values", "indices"))
    begin, end = number(0), width
    if cfg.split:
        span = (width + (parts - 1)) // parts
        begin = minimum(part * span, width)
        end = minimum(begin + span, width)

    # main loop
    may_prime = cfg.most_k <= PRIMED_K
    if p.layout == "last":
        count, _ = scan.over(x, begin, end, scan.primed(x, begin, end) if may_prime else scan.start())
    else:
        count, _ = scan.gathered(x, begin, end, scan.start(), may_prime)

    # epilogue
    def finish(count: Value, visit) -> Value:
        """All wanted candidates in order; how many there are."""

        @k.when(count > most_left(want), carry=count)
        def left(count):
            return board.cut(count, want, most_left(want))[0]

        if most_left(cfg.most_k) <= COUNT_MOST:
            board.ranked(left, visit)
        else:
            board.sorted(left, board.beyond(most_left(cfg.most_k)), visit)
        return left

    def to_results(rank, key, position):
        @k.when(rank < want)
        def _():
            put_result(k, order, x, values, indices, rank, key, position)

    if not cfg.split:
        finish(count, to_results)
        return

    # each part leaves its k best, in order, in the workspace; the last one of a row takes up all of them
    workspace = given["workspace"]
    counter = View(advance(workspace.pointer, row, u32), u32, (1,), (1,))
    lists = workspace.at((row * parts).to(i64) * cfg.most_k + COUNTERS // u64.bytes)

    def to_list(rank, key, position):
        @k.when(rank < want)
        def _():
            lists.put(entry(key, position), part * want + rank)

    there = finish(count, to_list)

    @k.loop(there.to(i32), want.to(i32))
    def fill(rank):
        lists.put(constant(0, u64), part * want + rank.to(u32))

    k.target.publish()

    @k.when(atomic(k, "add", counter, number(1), 0).equals(parts - 1))
    def last():
        k.target.observe()
        counter.put(number(0), 0)

        @k.loop(0, (parts * want).to(i32), carry=scan.start())
        def merged(i, s):
            e = lists.get(i)
            board.put(s[0], key_of(e), position_of(e))
            return scan.cut_if_full((s[0] + one(e > 0), s[1]))

        finish(merged[0], to_results)


KERNEL = topk_scan
