"""One group's operands and scales as matrices: the views that the scaled kernels' parts take."""

from __future__ import annotations

from dataclasses import replace

from flykernels.dtypes import i64
from flykernels.lang import Value, View
from flykernels.lang.memory import advance
from flykernels.microscaling import BLOCK

from .problem import ScaledGroupedProblem


def matrix(p: ScaledGroupedProblem, given: dict, name: str, group, first, size) -> View:
    """A group's "a" (M, bytes of K), "b" (bytes of K, N), "scale_a" (M, blocks), "scale_b" (N, blocks) or "c" (M, N);
    with a scale for each row "scale_a" (M,) and "scale_b" (N,).

    group: its number; first, size: which of T it has, in numbers (ints or Values)."""
    wide = lambda x: x.to(i64) if isinstance(x, Value) else x
    group, first = wide(group), wide(first)
    which = name[-1]
    if name.startswith("scale") and p.scaling == "row":
        view, offset = given[name], first if which == "a" else group * given["scale_b_group"]
        pointer = advance(view.pointer, offset, view.dtype)
        return replace(view, pointer=pointer, shape=(size if which == "a" else p.n,), stride=(1,), multiple=())
    per = BLOCK if name.startswith("scale") else 1 if which == "c" else p.per_byte(which)
    m, deep = (size, p.k // per) if p.form == "m" else (p.m, size // per)
    pitch = given[f"{name}_{'col' if which == 'b' else 'row'}"]
    if p.has_groups(which):
        offset = group * given[f"{name}_group"]
    elif p.form == "m":
        offset = first * pitch  # rows belong to groups
    else:
        offset = first // per  # what is summed over does
    align = {"a": p.align_a, "b": p.align_b, "c": p.align_c}[which]
    if name.startswith("scale"):
        align = p.align_scales if p.form == "m" else 1
    elif p.form == "k" and which != "c":
        align = min(align, BLOCK // per)  # a group may begin at any block
    shape, stride = {
        "a": ((m, deep), (pitch, 1)),
        "b": ((deep, p.n), (1, pitch)),
        "c": ((m, p.n), (pitch, 1)),
        "scale_a": ((m, deep), (pitch, 1)),
        "scale_b": ((p.n, deep), (pitch, 1)),
    }[name]
    view = given[name]
    return replace(
        view, pointer=advance(view.pointer, offset, view.dtype), shape=shape, stride=stride, alignment=align,
        stride_multiple=max(1, align // view.dtype.bytes), multiple=(),
    )  # fmt: skip
