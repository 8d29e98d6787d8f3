"""One way to do a GEMM on a CPU: what `space.py` proposes and the kernels are specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class X86Config:
    """Blocking of one kernel. Sizes count elements.

    family    "panel": a (rows x columns) block of C in registers; each step broadcasts A's column over B's row.
              "dot": vectors run along K, for A row- and B column-major; nothing is packed, sums are folded at the end
    rows      of the register block
    columns   of the register block; "panel": a multiple of the vector length
    k_block   K handled at a time: a multiple of `unroll` (and, if there is more than one block, of two vectors)
    m_block   rows of A whose k_block stays in L2 while B passes by
    tile_m, tile_n   of C, one workgroup; multiples of rows and columns
    unroll    steps along K in one turn of the inner loop; a multiple of 2
    pack_a    A's block is copied to f32 panels of `rows`; else it is read where it is (f32, row-major)
    pack_b    B's block is copied to panels of `columns`; else rows of B are read where they are
    threads   at most so many share the workgroups
    """

    family: str
    rows: int
    columns: int
    k_block: int
    m_block: int
    tile_m: int
    tile_n: int
    unroll: int = 4
    pack_a: bool = False
    pack_b: bool = True
    threads: int = 1

    workgroup_size = 1

    def __post_init__(self):
        for name, value in (("tile_m", self.rows), ("m_block", self.rows), ("tile_n", self.columns)):
            if value < 1 or getattr(self, name) < 1 or getattr(self, name) % value:
                raise ValueError(f"{self}: {name} must be a positive multiple of {value}")
        if self.k_block < 1 or self.unroll < 2 or self.unroll % 2 or self.k_block % self.unroll:
            raise ValueError(f"{self}: k_block must be a multiple of unroll, and unroll an even number")
        if self.family not in ("panel", "dot"):
            raise ValueError(f"{self}: the families are panel and dot")

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
