"""What an RMSNorm is asked to do: everything a kernel is specialised for, and nothing else.

Forward, row by row:   y = x rstd w   with   rstd = 1 / sqrt(mean(x^2) + eps),   or of x + residual, which is also left.
Backward:              dx = rstd (g - x rstd^2 mean(g x)) [+ dsum]   with   g = dy w,   dw = sum over rows of dy x rstd.

The dtypes are ATen's (aten::rms_norm, aten::_fused_rms_norm): y, sum and dx have x's type, dw the weight's, rstd is
f32. All arithmetic is in f32 and each result is rounded once; x + residual is rounded to x's type before it is
normalised, as `x + residual` by itself would be. eps=None means float32's epsilon, 2**-23, whatever the type of x: ATen
takes it from the type that it computes in (see `eps_or_default`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import gcd

from flykernels.dtypes import DType, dtype

DTYPES = ("f32", "bf16", "f16")
DIRECTIONS = ("forward", "backward")
WIDEST = 262144  # elements of a row
VECTOR_BYTES = 16  # of the widest access of one GPU lane: a larger alignment says nothing more
DEFAULT_EPS = 2.0**-23


def eps_or_default(eps: float | None) -> float:
    """What ATen takes for `eps`, for the dtypes of this template."""
    return DEFAULT_EPS if eps is None else eps


@dataclass(frozen=True)
class RMSNormProblem:
    """RMSNorm over rows of `width` elements; how many rows there are and how far apart are run-time arguments.

    width            elements of a row (the product of normalized_shape), 1 to 262144; None, on x86 only: a run-time
                     argument. There one kernel serves all widths; a GPU holds rows in registers, a fixed number
    dtype            of x, y, residual, sum, dy, dsum and dx: "f32", "bf16" or "f16"
    weight_dtype     of weight and dweight: "f32", "bf16" or "f16"; "none" without a weight
    direction        "forward" or "backward"
    residual         forward: x + residual is normalised, and left as `sum`.
                     backward: the gradient `dsum` of that sum is added to dx, which is then x's and residual's
    rstd             forward only: rstd of each row is left too, for the backward pass, which always reads it
    weight_gradient  backward only: dweight is computed, in an order that depends on `parts` alone, not on timing
    align            bytes that every input's pointer and row stride is a multiple of: a power of two from an element's
                     size to 16. Results are dense, and start at multiples of 16 bytes
    rows_hint        the rows that tuning is done for; says nothing about correctness
    """

    width: int | None
    dtype: str = "f32"
    weight_dtype: str = "none"
    direction: str = "forward"
    residual: bool = False
    rstd: bool = False
    weight_gradient: bool = False
    align: int = VECTOR_BYTES
    rows_hint: int = 1024

    @property
    def type(self) -> DType:
        return dtype(self.dtype)

    @property
    def weight_type(self) -> DType | None:
        return None if self.weight_dtype == "none" else dtype(self.weight_dtype)

    @property
    def backward(self) -> bool:
        return self.direction == "backward"

    @property
    def widest_vector(self) -> int:
        """Elements that may move together on a GPU: as all rows' starts are aligned, also those of dense results."""
        assert self.width is not None
        return gcd(self.align, self.width * self.type.bytes, VECTOR_BYTES) // self.type.bytes

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("weight_dtype", self.weight_dtype, (*DTYPES, "none")),
            ("direction", self.direction, DIRECTIONS),
        ):
            if value not in known:
                return f"{name} is {value!r}; kernels exist for {', '.join(known)}"
        if self.width is None and target.name != "x86":
            return f"the width is not known, and {target.name} holds rows in a fixed number of registers"
        if self.width is not None and not 1 <= self.width <= WIDEST:
            return f"rows of {self.width} elements; kernels exist for 1 to {WIDEST}"
        if not self.type.bytes <= self.align <= VECTOR_BYTES or self.align & (self.align - 1):
            return f"align is {self.align}; it must be a power of two from {self.type.bytes} to {VECTOR_BYTES} bytes"
        if self.backward and self.rstd:
            return "rstd is something that the forward pass leaves; the backward pass always reads it"
        if self.weight_gradient and (not self.backward or self.weight_dtype == "none"):
            return "a weight gradient needs direction 'backward' and a weight"
        return None

    def canonical(self, target) -> RMSNormProblem:
        """The problem that stands for all that share its kernel and its tuning on `target`: what a cache is asked for.

        On x86 the width is a run-time argument and vectors may start anywhere. On a GPU, rows are hinted by powers of
        two, and as many as fill the device some times over are many."""
        if target.name == "x86":
            return replace(self, width=None, align=self.type.bytes, rows_hint=1)
        most = 1 << (16 * target.limits.compute_units).bit_length()
        return replace(self, rows_hint=min(most, 1 << max(0, self.rows_hint - 1).bit_length()))

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)


def alignment_of(element_bytes: int, *addresses_and_strides: int) -> int:
    """`align` for these addresses and row strides in bytes; a stride that is not used (one row) should not be named."""
    together = VECTOR_BYTES
    for x in addresses_and_strides:
        together |= x
    return max(element_bytes, together & -together)
