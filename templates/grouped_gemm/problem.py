"""What a grouped matrix product is asked to do: everything a kernel is specialised for, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from templates.gemm.problem import DTYPES, LARGEST, LAYOUTS, GemmProblem, Typed, not_aligned, not_known

FORMS = ("m", "n", "k", "batch")
RUN_TIME = {"m": "m", "n": "n", "k": "k", "batch": "m"}  # the size that only the run knows
GROUPS_MOST = 512
C_LAYOUTS = ("row", "col")
OTHER = {"row": "col", "col": "row", "any": "any"}  # the layout of the transposed matrix


@dataclass(frozen=True)
class GroupedGemmProblem(Typed):
    """C = A B for each of `groups` groups, summed in f32: what torch.nn.functional.grouped_mm computes.

    form      A            B            C
    "m"       (T, K)       (G, K, N)    (T, N)       rows of A belong to groups: an MoE layer's forward
    "n"       (G, M, K)    (K, T)       (M, T)       columns of B do
    "k"       (M, T)       (T, N)       (G, M, N)    what is summed over does: the weight's gradient
    "batch"   (G, T, K)    (G, K, N)    (G, T, N)    none: every group has T rows

    T is only known at run time. Which of T belong to a group is told by `offs`, G values of i32 in device memory:
    group g has offs[g - 1] .. offs[g] - 1, the first one 0 .. offs[0] - 1; see `reference.bounds` for what becomes of
    offs that decrease, are negative or go past T. What lies past offs[-1] is not written in C ("m", "n"), not read
    otherwise. An empty group writes nothing, or ("k", and K = 0) zeros.

    form        one of FORMS
    groups      G, 1 to 512
    m, n, k     sizes of a group's product; 0 for the one that is only known at run time (RUN_TIME). k may be 0
    dtype       of A and B: "f32", "bf16" or "f16"
    out_dtype   of C
    a, b        where each operand's unit stride is, of its last two axes: "row", "col" or "any". The usual MoE weight,
                (G, N, K).transpose(-2, -1), is "col"
    c           "row", or "col" for what form "n" becomes when it is turned round; see `flipped`
    tokens_hint the T that tuning is done for; says nothing about correctness
    align_a     bytes that A's pointer and its strides (but one of 1) are multiples of: at least an element's
    align_b     the same of B
    align_c     the same of C
    """

    form: str
    groups: int
    m: int = 0
    n: int = 0
    k: int = 0
    dtype: str = "bf16"
    out_dtype: str = "bf16"
    a: str = "row"
    b: str = "col"
    c: str = "row"
    tokens_hint: int = 4096
    align_a: int = 16
    align_b: int = 16
    align_c: int = 16

    @property
    def ragged(self) -> bool:
        """Whether `offs` says which part of T a group has."""
        return self.form != "batch"

    @property
    def group_hint(self) -> int:
        """T of an average group."""
        return max(1, self.tokens_hint if self.form == "batch" else -(-self.tokens_hint // self.groups))

    def has_groups(self, operand: str) -> bool:
        """Whether "a", "b" or "c" has a leading axis of groups."""
        return self.form == "batch" or operand == {"m": "b", "n": "a", "k": "c"}[self.form]

    @property
    def flipped(self) -> GroupedGemmProblem:
        """The same product as C^T = B^T A^T: form "n" becomes "m" (and "m" would become "n"), A and B change places."""
        return replace(
            self, form={"m": "n", "n": "m"}.get(self.form, self.form), m=self.n, n=self.m, a=OTHER[self.b],
            b=OTHER[self.a], c=OTHER[self.c], align_a=self.align_b, align_b=self.align_a,
        )  # fmt: skip

    @property
    def dense(self) -> GemmProblem:
        """One group's product as a dense one, for kernels' parts and for choosing tiles; the run-time size is a hint.

        Where the elements of T are neighbours in memory a group may start at any of them, so alignment is lost."""
        if self.form == "n":
            return self.flipped.dense
        one, hint = self.input_type.bytes, self.group_hint
        n, k, m = self.n, max(1, self.k), hint
        align_a, align_b, align_c = self.align_a, self.align_b, self.align_c
        if self.form == "m" and self.a != "row":
            align_a = one
        if self.form == "m" and self.c != "row":
            align_c = self.output_type.bytes
        if self.form == "k":
            k, m = hint, self.m
            align_a = align_a if self.a == "col" else one
            align_b = align_b if self.b == "row" else one
        return GemmProblem(
            n=n, k=k, dtype=self.dtype, out_dtype=self.out_dtype, a=self.a, b=self.b, m_hint=m, align_a=align_a,
            align_b=align_b, align_c=align_c,
        )  # fmt: skip

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        unknown = not_known(
            ("form", self.form, FORMS),
            ("dtype", self.dtype, DTYPES),
            ("out_dtype", self.out_dtype, DTYPES),
            ("layout of A", self.a, LAYOUTS),
            ("layout of B", self.b, LAYOUTS),
            ("layout of C", self.c, C_LAYOUTS),
        )
        if unknown:
            return unknown
        if self.groups < 1:
            return f"{self.groups} groups: there is nothing to multiply, which is left to ATen"
        if self.groups > GROUPS_MOST:
            return f"{self.groups} groups: kernels keep track of at most {GROUPS_MOST}"
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        run_time = RUN_TIME[self.form]
        if sizes.pop(run_time):
            return f"{run_time} is only known at run time where the form is {self.form!r}: it must be 0 here"
        for name, size in sizes.items():
            if size < (0 if name == "k" else 1):
                return f"{name} = {size}: an empty product is left to ATen"
            if size > LARGEST:
                return f"{name} = {size}: sizes above {LARGEST} are left to ATen"
        return not_aligned(
            ("align_a", self.align_a, self.input_type.bytes),
            ("align_b", self.align_b, self.input_type.bytes),
            ("align_c", self.align_c, self.output_type.bytes),
        )

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
