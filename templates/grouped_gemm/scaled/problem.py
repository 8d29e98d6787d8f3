"""What a grouped product of MXFP8 or MXFP4 matrices is asked to do: everything a kernel is specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flykernels.dtypes import dtype
from flykernels.microscaling import BLOCK, FORMATS
from templates.gemm.problem import LARGEST, Typed, not_known
from templates.scaled_gemm.problem import ALIGN, ScaledGemmProblem

from ..problem import GROUPS_MOST, RUN_TIME

FORMS = ("m", "k")
SCALINGS = ("block", "row")


@dataclass(frozen=True)
class ScaledGroupedProblem(Typed):
    """C = (A scales_a) (B scales_b) for each of `groups` groups, summed in f32; what is summed over lies contiguous.

    form   A         scales of A    B            scales of B        C
    "m"    (T, K)    (T, K / 32)    (G, K, N)    (G, N, K / 32)     (T, N)       a layer's forward, its input's gradient
    "k"    (M, T)    (M, T / 32)    (T, N)       (N, T / 32)        (G, M, N)    its weight's gradient

    A is row-major, B column-major, C row-major; scales are E8M0 bytes, not swizzled, one for 32 numbers along what is
    summed over. T, which is only known at run time, and all strides are run-time arguments. Groups are as
    GroupedGemmProblem says: offs[g - 1] .. offs[g] - 1 of T, cut to 0 .. T and never decreasing. In form "k" a block of
    32 has one scale, so it belongs to one group: T is a multiple of 32, and so must offs be (what is not is taken for
    the multiple of 32 below). An empty group writes nothing, or ("k") zeros. What no group owns is not written.

    scaling     "block": as above. "row", of form "m" and FP8: one f32 for a row of A, (T,), and for a column of a
                group's B, (G, N), both dense but for the stride from group to group
    groups      G, 1 to 512
    m, n, k     sizes of a group's product in numbers; 0 for the one that is only known at run time
    a_dtype     of A: "f8E4M3FN", "f8E5M2" or "f4E2M1FN" (two a byte along what is summed over)
    b_dtype     of B, independent of A's
    out_dtype   of C: "bf16", "f16" or "f32"
    tokens_hint the T that tuning is done for; says nothing about correctness
    align_a     bytes that A's pointer and its row stride are multiples of
    align_b     the same of B, its column stride and its groups' stride
    align_c     the same of C
    align_scales  the same of both operands' scales: 1 or, where a row has whole words of them, 4
    """

    form: str
    groups: int
    m: int = 0
    n: int = 0
    k: int = 0
    a_dtype: str = "f8E4M3FN"
    b_dtype: str = "f8E4M3FN"
    out_dtype: str = "bf16"
    tokens_hint: int = 4096
    align_a: int = ALIGN
    align_b: int = ALIGN
    align_c: int = ALIGN
    align_scales: int = 4
    scaling: str = "block"

    ragged, c = True, "row"  # what the other grouped kernels' parts ask of their problem

    @property
    def unit(self) -> int:
        """Numbers of T that groups begin and end at multiples of."""
        return BLOCK if self.form == "k" else 1  # a block of T has one scale

    @property
    def group_hint(self) -> int:
        """T of an average group."""
        return max(self.unit, -(-max(1, self.tokens_hint) // self.groups // self.unit) * self.unit)

    def has_groups(self, operand: str) -> bool:
        """Whether "a", "b" or "c" has a leading axis of groups."""
        return operand == {"m": "b", "k": "c"}[self.form]

    @property
    def dense(self) -> ScaledGemmProblem:
        """One group's product as a dense one; the run-time size is a hint."""
        m, k = (self.group_hint, self.k) if self.form == "m" else (self.m, self.group_hint)
        return ScaledGemmProblem(
            n=self.n, k=k, a_dtype=self.a_dtype, b_dtype=self.b_dtype, out_dtype=self.out_dtype, m_hint=m,
            align_a=self.align_a, align_b=self.align_b, align_c=self.align_c, scaling=self.scaling,
        )  # fmt: skip

    def per_byte(self, which: str) -> int:
        """Numbers in a byte of operand "a" or "b"."""
        return FORMATS[dtype(self.a_dtype if which == "a" else self.b_dtype)].per_byte

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        unknown = not_known(("form", self.form, FORMS), ("scaling", self.scaling, SCALINGS))
        if unknown:
            return unknown
        if self.scaling == "row" and self.form != "m":
            return "a scale for each row and column: only of form 'm', a layer's forward and its input's gradient"
        if not 1 <= self.groups <= GROUPS_MOST:
            return f"{self.groups} groups: kernels keep track of 1 to {GROUPS_MOST}"
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        run_time = RUN_TIME[self.form]
        if sizes.pop(run_time):
            return f"{run_time} is only known at run time where the form is {self.form!r}: it must be 0 here"
        for name, size in sizes.items():
            if not 1 <= size <= LARGEST:
                return f"{name} = {size}: kernels exist for 1 to {LARGEST}"
        return self.dense.why_not(target)

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
