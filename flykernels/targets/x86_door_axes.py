"""How a tensor lies, as doors (x86_door.py) look at it: MLIR text that walks over sizes and strides."""

from __future__ import annotations

from .x86_door import all_of, constants, fill, word


def collapse() -> str:
    """collapse(sizes, strides, first, end, at): 1 if these axes are evenly spaced, as one axis is; at = {elements,
    stride, or 0 of one element}."""
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
    {fill("%at", {0: "%count", 1: "%stride"})}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def collapsed(result: str, axes: str, first: str, end: str, at: str) -> str:
    """result = what `collapse` says of axes first <= i < end. axes: "%sizes, %strides"."""
    types = "(!llvm.ptr, !llvm.ptr, i64, i64, !llvm.ptr) -> i1"
    return f"\n    {result} = llvm.call @collapse({axes}, {first}, {end}, {at}) : {types}"


def dense(sizes: str, strides: str, yes: str, no: str, wanted: str = "", more: str = "") -> str:
    """^axis(rank, one) and on: whether axes lie as a dense tensor's. To `yes`, where %next is the number of elements, or
    to `no`.

    wanted  text that makes %w, the size that axis %i must have; else any will do
    more    conditions on the axis, as `all_of` takes them"""
    conditions = [*(["%s eq %w"] if wanted else []), *([more] if more else [])]
    return f"""
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
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
