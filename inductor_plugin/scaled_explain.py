"""`flykernels explain _scaled_mm`: is a scaled product eligible, what are its candidates, what won."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from flykernels.dtypes import dtype as element_type
from templates.scaled_gemm.problem import ScaledGemmProblem
from tuning_cache import Key
from tuning_cache.shapes import Shape

from . import wanted
from .devices import DEVICES
from .explain import Question, answer
from .fingerprint import versions
from .scaled import _why_not_here

__all__ = ["ScaledQuestion", "answer"]
SHORT = {"mxfp8": "f8E4M3FN", "mxfp4": "f4E2M1FN", "fp8": "f8E4M3FN"}


@dataclass(frozen=True)
class ScaledQuestion(Question):
    """A scaled product as the command line asks about it: A row-major, B column-major.

    dtype    of A and B, or of each with a comma between: "mxfp8", "mxfp4", or names such as "f8E5M2,f4E2M1FN"
    scaling  "block", "tensor" or "row": see ScaledGemmProblem
    out      C's type
    """

    scaling: str = "block"
    out: str = "bf16"

    @property
    def problem(self) -> ScaledGemmProblem:  # type: ignore[override]
        a, _, b = self.dtype.partition(",")
        name = lambda x: element_type(SHORT.get(x.strip().lower(), x.strip())).name
        shape = Shape(
            "scaled_mm", self.m, self.n, self.k, name(a), bias="none" if self.bias == "none" else "row",
            hint=self.hint, b_dtype=name(b or a), scaling=self.scaling, out_dtype=self.out,
        )  # fmt: skip
        return wanted.problems_of(shape, self.target, {})[0].problem

    @property
    def key(self) -> Key:
        """The key under which the plugin would look this up on this machine."""
        problem = {**self.problem.key(), "m": "symbolic" if self.m is None else self.m}
        device = next(d for d in DEVICES.values() if d.target == self.target)
        return Key(self.op, problem, device.description(), versions("scaled_gemm"))

    def refused(self) -> str | None:
        if self.layout != "NT" or self.batch != 1 or self.residual or self.frozen:
            return "scaled products are of one matrix A, row-major, and one B, column-major (NT), without residual"
        p = self.problem
        return p.why_not(SimpleNamespace(name=self.target)) or _why_not_here(p, self.target)
