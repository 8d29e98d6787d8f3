"""How a tensor lies, as doors (x86_door.py) look at it: MLIR text that walks over sizes and strides."""

from __future__ import annotations

from collections.abc import Sequence

from .x86_door import all_of, constants, fill, put, word


def collapse() -> str:
    """collapse(sizes, strides, first, end, at): 1 if these axes are evenly spaced, as one axis is; at = {elements,
    stride, or 0 of one element, the first of the last axes that are}."""
    return f"""
  llvm.func internal @collapse(%sz: !llvm.ptr, %st: !llvm.ptr, %first: i64, %end: i64, %at: !llvm.ptr) -> i1 {{
    {constants(zero=0, one=1)}
    llvm.br ^axis(%end, %one, %zero, %zero : i64, i64, i64, i64)
  ^axis(%above: i64, %count: i64, %stride: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %first : i64
    llvm.cond_br %more, ^size, ^all
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    %single = llvm.icmp "eq" %s, %one : i64
    llvm.cond_br %single, ^axis(%i, %count, %stride, %next : i64, i64, i64, i64), ^several
  ^several:
    %innermost = llvm.icmp "eq" %count, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %fits = llvm.or %innermost, %follows : i1
    {all_of("%c", "%fits", "%s sgt %zero")}
    %stride2 = llvm.select %innermost, %t, %stride : i1, i64
    %next2 = llvm.mul %t, %s : i64
    %count2 = llvm.mul %count, %s : i64
    llvm.cond_br %c, ^axis(%i, %count2, %stride2, %next2 : i64, i64, i64, i64), ^no
  ^all:
    {fill("%at", {0: "%count", 1: "%stride", 2: "%above"})}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    {fill("%at", {0: "%count", 1: "%stride", 2: "%above"})}
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def collapsed(result: str, axes: str, first: str, end: str, at: str) -> str:
    """result = what `collapse` says of axes first <= i < end. axes: "%sizes, %strides"."""
    types = "(!llvm.ptr, !llvm.ptr, i64, i64, !llvm.ptr) -> i1"
    return f"\n    {result} = llvm.call @collapse({axes}, {first}, {end}, {at}) : {types}"


def dense(sizes: str, strides: str, yes: str, no: str, wanted: str = "", more: str = "", end: str = "%zero") -> str:
    """^axis(rank, one) and on: whether the axes from `end` on lie as a dense tensor's. To `yes`, where %next is the
    number of their elements, or to `no`.

    wanted  text that makes %w, the size that axis %i must have; else any will do
    more    conditions on the axis, as `all_of` takes them"""
    conditions = [*(["%s eq %w"] if wanted else []), *([more] if more else [])]
    return f"""
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, {end} : i64
    llvm.cond_br %more, ^size, {yes}
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", sizes, "%i")}
    {word("%t", strides, "%i")}
    {wanted}
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %lies = llvm.or %single, %follows : i1
    {all_of("%good", "%lies", *conditions)}
    %next2 = llvm.mul %next, %s : i64
    llvm.cond_br %good, ^axis(%i, %next2 : i64, i64), {no}"""


def lay_out(rank: str, source: str, then: str, made: Sequence[tuple[str, str, str]], sizes: str = "") -> str:
    """Dense tensors of as many axes as another has, whose sizes are at `source`; goes on to block `then`.

    made   for each (size of axis %i, where sizes are put or "", where strides are)
    sizes  text that makes these sizes of %s, the other's"""
    kinds, starts = ", ".join(["i64"] * (1 + len(made))), ", ".join(["%one"] * len(made))
    steps = ", ".join(f"%step{n}: i64" for n in range(len(made)))
    walk = ""
    for n, (size, sizes_at, strides_at) in enumerate(made):
        walk += put(size, sizes_at, "%i") if sizes_at else ""
        walk += put(f"%step{n}", strides_at, "%i")
        walk += f"""
    %some{n} = llvm.intr.umax({size}, %one) : (i64, i64) -> i64
    %after{n} = llvm.mul %step{n}, %some{n} : i64"""
    return f"""
    llvm.br ^axis({rank}, {starts} : {kinds})
  ^axis(%above: i64, {steps}):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, {then}
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", source, "%i")}
    {sizes}
    {walk}
    llvm.br ^axis(%i, {", ".join(f"%after{n}" for n in range(len(made)))} : {kinds})"""
