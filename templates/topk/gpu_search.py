"""The threshold search: which key do at least k of the workgroup's keys reach, and not many more?

All threads look at once, each at keys of its own. A round counts the keys at and above a few pivots, as many as have
room in a word or two, and keeps the part of the range that holds the answer. Data plays no part in what it costs but by
the number of rounds: no two threads compete for a histogram's bin."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from flykernels.lang import Kernel, Tally, Value, View, atomic, constant, maximum, minimum, over_lanes, select, u32
from flykernels.lang.collective import TALLY_WORDS
from flykernels.layout import Layout

from .order import ALL, NOBODY

PIVOTS = 3  # that a round counts at least: each makes rounds fewer, and each longer
MOST_WORDS = 2  # of counts

Fold = Callable  # fold(start, f): f(f(start, key), key) ... over this thread's keys; key 0 is none


def number(x: int) -> Value:
    return constant(x, u32)


def over(keys: list[Value]) -> Fold:
    """The Fold of keys in registers."""
    return lambda start, f: reduce(f, keys, start)


class Searches:
    """Shared memory of `n` searches. `clear()` before they are used, and a barrier after it; between a search's end and
    the next `clear()` lies another barrier."""

    WORDS = 2 + TALLY_WORDS * MOST_WORDS  # least and greatest key, and a tally's

    def __init__(self, k: Kernel, n: int):
        self.k, self.n = k, n
        self.words = k.shared(u32, Layout((n * self.WORDS,), (1,)))

    def clear(self):
        thread = self.k.thread

        @self.k.when(thread < self.n * self.WORDS)
        def _():
            self.words.put(select((thread % self.WORDS).equals(0), number(ALL), number(NOBODY)), thread)

    def __getitem__(self, i: int) -> Search:
        return Search(self.k, self.words.at(i * self.WORDS))


class Search:
    """One search of a workgroup, once after each `clear()` of its words."""

    def __init__(self, k: Kernel, words: View):
        self.k, self.ends = k, words
        self.tally = Tally(k, u32, words.at(2), MOST_WORDS)

    def __call__(self, fold: Fold, highest: int, want: Value, most: Value) -> tuple[Value, Value, Value]:
        """(T, how many keys are >= T, how many are > T where the first is above `most`).

        At least `want` keys are >= T, and at most `most` unless more are equal to T. Where fewer than `want` are not 0,
        T is the least of them. highest: more keys than the workgroup has."""
        k = self.k
        extend = lambda s, x: (minimum(s[0], select(x.equals(NOBODY), number(ALL), x)), maximum(s[1], x))
        least, greatest = fold((number(ALL), number(NOBODY)), extend)
        least, greatest = (over_lanes(k, n, v, k.target.lanes) for n, v in (("min", least), ("max", greatest)))

        @k.when((k.thread % k.target.lanes).equals(0))
        def _():
            atomic(k, "min", self.ends, least, 0)
            atomic(k, "max", self.ends, greatest, 1)

        k.barrier()
        bits = highest.bit_length()  # of a count
        in_word = 32 // bits
        counted = min(MOST_WORDS, -(-PIVOTS // in_word))
        pivots = in_word * counted

        @k.repeat(
            carry=(self.ends.get(0), self.ends.get(1), number(ALL), number(0), number(0)),
            going=lambda s: (s[0] < s[1]) & (s[2] > most),
        )
        def found(s):
            low, high, count, above, slot = s
            span = high - low
            step = span // (pivots + 1)
            at = [low + minimum(span, maximum(step * j, j)) for j in range(1, pivots + 1)]
            reached = lambda x, j: select(x >= at[j], number(1 << bits * (j % in_word)), number(0))
            words = [range(first, first + in_word) for first in range(0, pivots, in_word)]
            add = lambda n, x: tuple(sum((reached(x, j) for j in js), so_far) for so_far, js in zip(n, words))
            totals = self.tally.sums(fold((number(0),) * counted, add), slot)
            counts = [(total >> bits * j) & ((1 << bits) - 1) for total in totals for j in range(in_word)]
            for pivot, n in zip(at, counts):
                low, count = select(n >= want, pivot, low), select(n >= want, n, count)
            for pivot, n in reversed(list(zip(at, counts))):
                high, above = select(n < want, pivot - 1, high), select(n < want, n, above)
            return low, high, count, above, self.tally.next_slot(slot)

        return found[0], found[2], found[3]


class Threshold:
    """A search by key, and where too many are equal a second one by position: the first of them are wanted."""

    def __init__(self, by_key: Search, by_position: Search):
        self.k, self.by_key, self.by_position = by_key.k, by_key, by_position

    def __call__(self, keys: Fold, highest: int, want, most, ties: Callable[[Value], Fold]) -> tuple[Value, Value]:
        """(T, P): what is wanted has a key > T, or a key T and a position whose complement is >= P.

        ties(T): for each of this thread's keys that is T the complement of its position, for others 0."""
        limit, count, above = self.by_key(keys, highest, want, most)

        @self.k.when(count > most, carry=number(0))
        def position(_):
            return self.by_position(ties(limit), highest, want - above, most - above)[0]

        return limit, position


def reaches(key: Value, complement: Value, limit: Value, position: Value) -> Value:
    """Whether an element is on the wanted side of a Threshold."""
    return (key > limit) | (key.equals(limit) & (complement >= position))
