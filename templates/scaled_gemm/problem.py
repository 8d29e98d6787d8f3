"""What a product of scaled FP8 or FP4 matrices is asked to do: everything a kernel is specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flykernels.dtypes import DType, dtype, f4e2m1, f8e4m3fn, f8e4m3fnuz, f8e5m2, u8
from flykernels.microscaling import BLOCK, FORMATS
from templates.gemm.problem import Typed, not_a_size, not_aligned, not_known

FP8 = (f8e4m3fn, f8e5m2)
OPERANDS = (*FP8, f4e2m1)
# One E8M0 byte for 32 numbers along K; one f32 for a matrix; one f32 for a row of A and a column of B.
SCALINGS = ("block", "tensor", "row")
OUT_DTYPES = ("bf16", "f16", "f32")
BIASES = ("none", "row")
ALIGN = 16  # bytes: what one lane loads at most


@dataclass(frozen=True)
class ScaledGemmProblem(Typed):
    """C = (A scales_a) (B scales_b) + bias, summed in f32. A is (M, K) row-major, B (K, N) column-major, C (M, N).

    N and K are constants of the kernel; M and the strides are run-time arguments.

    n, k        sizes, >= 1; K counts numbers, also of packed FP4
    a_dtype     of A: "f8E4M3FN", "f8E5M2" or "f4E2M1FN" (two a byte along K, first in the low half)
    b_dtype     of B, independent of A's
    scaling     "block": E8M0 bytes (M, K / 32) for A and (N, K / 32) for B, contiguous and not swizzled (torch's
                BlockWise1x32). "tensor": one f32 each. "row": f32 (M,) for A, (N,) for B
    out_dtype   of C and bias: "bf16", "f16" or "f32"
    bias        "none" or "row" (one value a column, (N,), added in f32)
    m_hint      the M that tuning is done for; says nothing about correctness
    align_a     bytes that A's pointer and row stride are multiples of; a power of two, at most 16 count
    align_b     the same of B and its column stride
    align_c     the same of C and its row stride, and of bias
    fast_accum  sums may be kept in what the matrix unit has alone: on sm_90a fewer bits than f32's, see `sm90a.py`.
                Other targets sum in f32 either way

    Block scaling multiplies each number by its scale in f32: where that overflows (scales from 2^120 on for e4m3), the
    MX specification leaves the result to the implementation. Here it is infinite on x86; on gfx950 what the matrix
    unit gives."""

    n: int
    k: int
    a_dtype: str = "f8E4M3FN"
    b_dtype: str = "f8E4M3FN"
    scaling: str = "block"
    out_dtype: str = "bf16"
    bias: str = "none"
    m_hint: int = 128
    align_a: int = ALIGN
    align_b: int = ALIGN
    align_c: int = ALIGN
    fast_accum: bool = False

    # What the dense kernels' parts ask of a problem: operands run along K, come as they are, nothing follows the bias
    a, b, packed_b, batched, activation, residual = "row", "col", False, False, "none", False

    @property
    def a_type(self) -> DType:
        return dtype(self.a_dtype)

    @property
    def b_type(self) -> DType:
        return dtype(self.b_dtype)

    @property
    def input_type(self) -> DType:
        """As operands lie in memory."""
        return u8

    def row_bytes(self, which: str) -> int:
        """Bytes of K numbers of operand "a" or "b"."""
        return self.k // FORMATS[self.a_type if which == "a" else self.b_type].per_byte

    @property
    def blocks(self) -> int:
        """Scales of a row of A or a column of B, with block scaling."""
        return self.k // BLOCK

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        for name in ("a_dtype", "b_dtype"):
            try:
                kind = dtype(getattr(self, name))
            except ValueError as e:
                return f"{name}: {e}"
            if kind == f8e4m3fnuz:
                return (
                    f"{name} is f8E4M3FNUZ (largest value 240), the FP8 of gfx942; {target.name} multiplies OCP's "
                    "f8E4M3FN (largest value 448): the same bytes mean other numbers. Quantise to f8E4M3FN"
                )
            if kind not in OPERANDS or getattr(self, name) != kind.name:
                return f"{name} is {getattr(self, name)!r}; kernels exist for {', '.join(d.name for d in OPERANDS)}"
        wrong = not_known(
            ("scaling", self.scaling, SCALINGS),
            ("out_dtype", self.out_dtype, OUT_DTYPES),
            ("bias", self.bias, BIASES),
        ) or not_a_size(self.n, self.k)
        if wrong:
            return wrong
        if self.scaling == "block" and self.k % BLOCK:
            return f"K = {self.k} is not a multiple of {BLOCK}, the numbers that share a scale: pad K with zeros"
        if self.scaling != "block" and f4e2m1 in (self.a_type, self.b_type):
            return f"{f4e2m1.name} has a scale for every {BLOCK} numbers; scaling {self.scaling!r} is for FP8"
        return not_aligned(
            ("align_a", self.align_a, 1),
            ("align_b", self.align_b, 1),
            ("align_c", self.align_c, self.output_type.bytes),
        )

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
