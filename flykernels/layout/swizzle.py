"""Swizzles: permutations of offsets that spread what is read together over the banks of shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Swizzle:
    """offset -> offset, its own inverse: bits [base, base+bits) are xor-ed with those `shift` above. CuTe's <b,m,s>.

    `also`: a second swizzle that is applied too. It must leave alone the bits that this one looks at, and the other way
    round: then their order does not matter and the pair is its own inverse as well."""

    bits: int = 0
    base: int = 0
    shift: int = 0
    also: Swizzle | None = None

    def __post_init__(self):
        parts = self.parts
        if any(p._reads & q._writes for p in parts for q in parts):
            raise ValueError(f"{self!r} changes bits that it looks at")
        if any(p._writes & q._writes for i, p in enumerate(parts) for q in parts[:i]):
            raise ValueError(f"{self!r} changes the same bits twice")

    @property
    def parts(self) -> list[Swizzle]:
        """This swizzle and the ones applied with it, those that do anything."""
        return ([self] if self.bits else []) + (self.also.parts if self.also else [])

    @property
    def _writes(self) -> int:
        return ((1 << self.bits) - 1) << self.base

    @property
    def _reads(self) -> int:
        return self._writes << self.shift

    def __call__(self, offset):
        """Where the element at `offset` (int, array or Value) really is."""
        out = offset
        for p in self.parts:
            out = out ^ ((offset >> p.shift) & p._writes)
        return out

    def __bool__(self) -> bool:
        """Whether it moves anything."""
        return bool(self.parts)

    @property
    def chunk(self) -> int:
        """Elements that stay neighbours: aligned groups of so many are moved as one (a power of two; 0: all)."""
        return min((1 << p.base for p in self.parts), default=0)

    @property
    def period(self) -> int:
        """Offsets that differ by a multiple of this are moved alike."""
        return max((1 << (p.base + p.bits + p.shift) for p in self.parts), default=1)

    def __repr__(self) -> str:
        mine = f"Sw<{self.bits},{self.base},{self.shift}>" if self.bits else ""
        also = repr(self.also) if self.also else ""
        return " ".join(filter(None, (mine, also))) or "identity"


IDENTITY = Swizzle()
