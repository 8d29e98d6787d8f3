"""What a dense matrix product is asked to do: everything a kernel is specialised for, and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from flykernels.dtypes import DType, dtype

DTYPES = ("f32", "bf16", "f16")
BIASES = ("none", "row", "full")
LARGEST = 2**31 - 1  # what a 32-bit loop counter holds
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
# Where the unit stride of a 2-D operand is: "row" (elements of a row are neighbours), "col", or "any" (neither).
LAYOUTS = ("row", "col", "any")


def not_known(*asked: tuple[str, str, Collection[str]]) -> str | None:
    """Of (name, value, known values): the first value that no kernel exists for, in words."""
    for name, value, known in asked:
        if value not in known:
            return f"{name} is {value!r}; kernels exist for {', '.join(known)}"
    return None


def not_a_size(n: int, k: int) -> str | None:
    """Why N and K are left to ATen, in words."""
    if min(n, k) < 1:
        return f"N = {n}, K = {k}: an empty product is left to ATen"
    if max(n, k) > LARGEST:
        return f"N = {n}, K = {k}: sizes above {LARGEST} are left to ATen"
    return None


def not_aligned(*asked: tuple[str, int, int]) -> str | None:
    """Of (name, alignment, least alignment), in bytes: the first that is none, in words."""
    for name, value, least in asked:
        if value < least or value & (value - 1):
            return f"{name} is {value}; it must be a power of two, and at least an element's {least} bytes"
    return None


class Typed:
    """A problem's element types, by the names that its fields hold."""

    dtype: str
    out_dtype: str

    @property
    def input_type(self) -> DType:
        """Of A and B."""
        return dtype(self.dtype)

    @property
    def output_type(self) -> DType:
        """Of C."""
        return dtype(self.out_dtype)


@dataclass(frozen=True)
class GemmProblem(Typed):
    """C = activation(A B + bias) + residual, accumulated in f32.

    A is (M, K), B is (K, N), C is (M, N); all may carry one leading batch axis. N and K are constants of the kernel; M,
    the row strides and the batch strides are run-time arguments, so one kernel serves a symbolic M and padded rows.

    n, k          sizes, >= 1
    dtype         of A and B: "f32", "bf16" or "f16"
    out_dtype     of C (and bias and residual)
    a, b          where each operand's unit stride is: "row", "col" or "any" (B of a Linear layer, weight.T, is "col")
    batched       a leading batch axis with run-time strides (0 allowed: broadcast)
    bias          "none", "row" (one value a column, shape (N,)) or "full" ((M, N), any strides: addmm's general input)
    activation    one of ACTIVATIONS, applied to A B + bias in f32
    residual      a (M, N) row-major tensor added after the activation
    packed_b      B is constant and arrives packed as `space.py`'s configuration says, not as (K, N)
    m_hint        the M that tuning is done for; says nothing about correctness
    align_a       bytes that A's pointer and its strides (but one of 1) are multiples of: at least an element's
    align_b       the same of B
    align_c       the same of C, bias and residual
    """

    n: int
    k: int
    dtype: str = "f32"
    out_dtype: str = "f32"
    a: str = "row"
    b: str = "row"
    batched: bool = False
    bias: str = "none"
    activation: str = "none"
    residual: bool = False
    packed_b: bool = False
    m_hint: int = 128
    align_a: int = 16
    align_b: int = 16
    align_c: int = 16

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        unknown = not_known(
            ("dtype", self.dtype, DTYPES),
            ("out_dtype", self.out_dtype, DTYPES),
            ("layout of A", self.a, LAYOUTS),
            ("layout of B", self.b, LAYOUTS),
            ("bias", self.bias, BIASES),
            ("activation", self.activation, ACTIVATIONS),
        )
        if unknown:
            return unknown
        wrong = not_a_size(self.n, self.k) or not_aligned(
            ("align_a", self.align_a, self.input_type.bytes),
            ("align_b", self.align_b, self.input_type.bytes),
            ("align_c", self.align_c, self.output_type.bytes),
        )
        if wrong:
            return wrong
        if self.packed_b and self.batched:
            return "a packed B has no batch axis"
        return None

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
