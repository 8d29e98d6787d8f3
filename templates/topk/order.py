"""The order of a top-k as unsigned numbers: the best element has the greatest key, and 0 is nobody's key.

    NaN of either sign       0xFFFFFFFF of the largest; 1 of the smallest, where it comes last
    -0 and +0                the same
    key with position        64 bits, key above the position's complement: all differ, of equals the first is greater

Positions are below 2**31. Short floats go through f32, which holds bf16 and fp16 exactly; the bits that are 0 in all
of a type's numbers may be left out of keys, so that a search has fewer of them to find. Keys of 8-byte elements have 64
bits; only the CPU's kernels take those, and integers, of which the worst has 0 for its key like nobody."""

from __future__ import annotations

from dataclasses import dataclass

from flykernels.dtypes import DType, bf16, f16, f64, i64
from flykernels.lang import Value, constant, f32, i32, maximum_or_nan, minimum, select, u32, u64

SIGN, ALL = 0x80000000, 0xFFFFFFFF
MOST_FINITE = {f32: 0xFF7FFFFF, f64: 0xFFEF_FFFF_FFFF_FFFF}  # the greatest key of a finite number
NOBODY = 0
ENTRY_BYTES = 8
SPARE_BITS = {bf16: 16, f16: 13}  # of an f32 that holds such a number: they are 0


@dataclass(frozen=True)
class Order:
    """Of the largest elements first, or of the smallest; of floats.

    spare   low bits of an f32's order that keys are without, as all numbers have zeros there
    number  what elements are compared as: f32, or f64"""

    largest: bool
    spare: int = 0
    number: DType = f32

    @staticmethod
    def of(largest: bool, element: DType) -> Order:
        """Of any type of elements."""
        if element.is_float:
            return Order(largest, number=element if element.bits > f32.bits else f32)
        return Integers(largest, number=element if element.bits > i32.bits else i32)

    @staticmethod
    def short(largest: bool, element: DType) -> Order:
        """With keys as short as the type allows."""
        return Order(largest, SPARE_BITS.get(element, 0))

    @property
    def keys(self) -> DType:
        """The type of keys."""
        return u64 if self.number.bits > u32.bits else u32

    @property
    def sign(self) -> int:
        return 1 << (self.number.bits - 1)

    @property
    def all(self) -> int:
        return (1 << self.number.bits) - 1

    @property
    def key_bits(self) -> int:
        return self.number.bits - self.spare

    @property
    def nan(self) -> int:
        return self.all >> self.spare if self.largest else 1

    @property
    def zero(self) -> int:
        return (self.sign if self.largest else self.sign - 1) >> self.spare

    @property
    def unbounded(self) -> Value:
        """A bound that nothing is worse than."""
        return constant(float("nan"), self.number)

    def key(self, x: Value) -> Value:
        """A number's key; of a vector's elements theirs."""
        plain, whole = x + 0.0, i64 if self.keys == u64 else i32  # + 0.0 makes +0 of -0
        bits = plain.bitcast(self.keys, x.width)
        flip = (plain.bitcast(whole, x.width) >> (self.number.bits - 1)).to(self.keys) | self.sign
        turned = bits ^ (flip if self.largest else flip ^ self.all)
        turned = turned >> self.spare if self.spare else turned
        return select(plain.equals(plain), turned, constant(self.nan, self.keys))

    def value(self, key: Value) -> Value:
        """The number with this key; +0 for zeros, some NaN for NaN, and any number for no key at all."""
        full = key << self.spare if self.spare else key
        bits = full if self.largest else full ^ self.all
        bits = select(bits < self.sign, bits ^ self.all, bits ^ self.sign)
        return (bits >> self.spare << self.spare if self.spare else bits).bitcast(self.number, key.width)

    def above(self, key: Value) -> Value:
        """What elements with greater keys are not worse than; above infinity: infinity."""
        return self.value(minimum(key, MOST_FINITE[self.number]) + 1)

    def lost(self, key: Value) -> Value | bool:
        """Whether the element itself must be looked up: its key does not tell it bit for bit."""
        return key.equals(self.zero) | key.equals(self.nan)

    def better(self, a: Value, b: Value) -> Value:
        """The better of two f32."""
        return maximum_or_nan(a, b) if self.largest else minimum(a, b)

    def may_beat(self, x: Value, limit: Value) -> Value:
        """Whether x may be better than `limit`, a number: never False where it is, and seldom True where it is not."""
        return (x <= limit) ^ 1 if self.largest else x < limit

    def not_worse(self, x: Value, bound: Value) -> Value:
        """Whether x may be as good as `bound` or better: never False where it is. True where one of them is NaN."""
        return ((x < bound) if self.largest else (x > bound)) ^ 1


class Integers(Order):
    """Of integers, compared as i32 or i64: each has a key of its own."""

    @property
    def unbounded(self) -> Value:
        return self.value(constant(NOBODY, self.keys))

    def key(self, x: Value) -> Value:
        return x.to(self.keys) ^ (self.sign if self.largest else self.sign - 1)

    def value(self, key: Value) -> Value:
        return (key ^ (self.sign if self.largest else self.sign - 1)).to(self.number)

    def above(self, key: Value) -> Value:
        """Above the greatest: that one."""
        return self.value(minimum(key, self.all - 1) + 1)

    def lost(self, key: Value) -> bool:
        return False

    def not_worse(self, x: Value, bound: Value) -> Value:
        return x >= bound if self.largest else x <= bound


def entry(key: Value, position: Value) -> Value:
    """Key and position in one number."""
    return entry_of(key, position ^ ALL)


def entry_of(key: Value, complement: Value) -> Value:
    """A key and the complement of a position in one number."""
    return (key.to(u64) << 32) | complement.to(u64)


def key_of(entry: Value) -> Value:
    return (entry >> 32).to(u32)


def position_of(entry: Value) -> Value:
    return entry.to(u32) ^ ALL


def one(condition: Value) -> Value:
    return select(condition, constant(1, u32), constant(0, u32))


def tree(combine, values) -> Value:
    """All of them combined, in as few steps as depend on each other."""
    values = list(values)
    while len(values) > 1:
        values = [combine(*pair) if len(pair) > 1 else pair[0] for pair in zip_pairs(values)]
    return values[0]


def zip_pairs(values: list) -> list[list]:
    return [values[i : i + 2] for i in range(0, len(values), 2)]
