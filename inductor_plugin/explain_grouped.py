"""Grouped products for `explain`: the question that F.grouped_mm's problem is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flykernels.dtypes import dtype as element_type
from templates.grouped_gemm.problem import FORMS, RUN_TIME, GroupedGemmProblem
from tuning_cache import Key

from . import grouped, wanted
from .devices import DEVICES
from .explain import Question
from .fingerprint import versions
from .strides import alignments, unit_stride

GROUPED = {"m": "b", "n": "a", "k": "c", "batch": "abc"}  # the operands that have an axis of groups, by form


@dataclass(frozen=True)
class GroupedQuestion(Question):
    """See Question; m, n and k are the operands' sizes, the one that groups share out being all groups' together.

    form    which axis groups share out: "m", "n", "k", or "batch": none
    groups  how many there are"""

    form: str = "m"
    groups: int = 8

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"form {self.form!r}: one of {', '.join(FORMS)}")

    @property
    def tokens(self) -> int | None:
        """The size that only the run knows; None: symbolic."""
        return getattr(self, RUN_TIME[self.form])

    @property
    def problem(self) -> GroupedGemmProblem:  # type: ignore[override]
        size = {"a": (self.m, self.k), "b": (self.k, self.n), "c": (self.m, self.n)}
        item, letter = element_type(self.dtype).bytes, {"a": self.layout[0], "b": self.layout[1], "c": "N"}
        of = lambda x: self.groups if x in GROUPED[self.form] else None
        held = {x: wanted.layout(size[x], letter[x], item, of(x)) for x in size}
        lie = {x: unit_stride(held[x].size[-2:], held[x].stride[-2:]) for x in "ab"}
        aligned: dict[str, Any] = alignments(held["a"], held["b"], [held["c"]]) if self.target != "x86" else {}
        made = GroupedGemmProblem(
            self.form, self.groups, self.m or 0, self.n, self.k, self.dtype, self.dtype, lie["a"], lie["b"],
            tokens_hint=self.hint if self.tokens is None else self.tokens, **aligned,
        )  # fmt: skip
        without: dict[str, Any] = {RUN_TIME[self.form]: 0}
        return replace(made, **without)

    @property
    def key(self) -> Key:
        """The key under which the plugin would look this up on this machine."""
        tokens = "symbolic" if self.tokens is None else self.tokens
        problem = {**self.problem.key(), grouped.RUN_TIME_SIZE: tokens}
        device = next(d for d in DEVICES.values() if d.target == self.target)
        return Key(self.op, problem, device.description(), versions(grouped.TEMPLATE))

    @property
    def title(self) -> str:
        shares = "no axis is shared out" if self.form == "batch" else f"groups share {self.form.upper()}"
        return f"{super().title}, {self.groups} groups, {shares}"
