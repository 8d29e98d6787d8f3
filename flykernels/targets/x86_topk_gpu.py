"""How the door for top-k (x86_topk_door.py) runs a kernel on a GPU: MLIR text.

A slot names a kernel that is one launch, whose arguments are those of templates/topk/arguments.py without a workspace,
and whose grid is one workgroup for so many rows. What needs more (workspace that belongs to a stream or a graph) goes
on to an operator of Python's with the same arguments.
"""

from __future__ import annotations

from ..launch import torch_door as door
from ..launch.torch_door import TopkGpuWords
from .x86_door import call, constants, put, pythons, room, strings, take
from .x86_topk_call import Word

PYTHONS = {"topk": "flykernels::_topk", "topk_values": "flykernels::_topk_values"}  # operators of Python's
STRIDES = 9  # words of strides, where each tensor has three
FIRST_STRIDE = 6  # the word after x, values, indices, rows, width and k
IN_ROWS, APART = FIRST_STRIDE + 3, FIRST_STRIDE + 1 + STRIDES  # arguments of kernels for either layout


def names() -> str:
    """Globals that `python` names."""
    named = {f"pythons_{entry}": name for entry, name in PYTHONS.items()}
    return strings(overload="", failed="topk failed", **named)


def device_of(result: str, code: str) -> str:
    """result = the device's number (i32) of a slot's code."""
    return f"""
    %_number = llvm.mlir.constant({door.THREADS_SHIFT} : i64) : i64
    %_device = llvm.lshr {code}, %_number : i64
    {result} = llvm.trunc %_device : i64 to i32"""


def python(entry: str, ours: str) -> str:
    """^whose: on to `ours` where %slot names a kernel, else the operator of Python's, which takes over the stack."""
    return f"""
  ^whose:
    {take("%slot", "!llvm.ptr", kernel=TopkGpuWords.FUNCTION)}
    %named = llvm.icmp "ne" %kernel, %null : !llvm.ptr
    llvm.cond_br %named, {ours}, ^python
    {pythons(f"pythons_{entry}")}"""


def launch() -> str:
    """launch(slot, call, values, indices, k): the slot's kernel on torch's current stream of the call's device; 0 if
    it was not launched."""
    first = ("%x", "%values", "%indices", "%rows", "%width", "%k")
    dense = ("%out_outer", "%inner_rows", "%one")
    apart = (*first, "%inner_rows", "%stride", "%along", "%inner", *dense, *dense)
    write = lambda words: "".join(put(v, "%words", i, kind) for i, (v, kind) in enumerate(words))
    pointers = lambda words: [(v, "!llvm.ptr" if v in first[:3] else "i64") for v in words]
    return f"""
  llvm.func internal @launch(
    %slot: !llvm.ptr, %call: !llvm.ptr, %values: !llvm.ptr, %indices: !llvm.ptr, %k: i64
  ) -> i1 {{
    {room("stream_", "here_", "guard_")}
    {constants(zero=0, one=1, any_bit=1 << door.ANY_BIT, most=APART, in_rows=IN_ROWS)}
    %null = llvm.mlir.zero : !llvm.ptr
    %none = llvm.mlir.constant(0 : i32) : i32
    %single = llvm.mlir.constant(1 : i32) : i32
    %words = llvm.alloca %most x i64 : (i64) -> !llvm.ptr
    %places = llvm.alloca %most x i64 : (i64) -> !llvm.ptr
    llvm.store %zero, %here_ : i64, !llvm.ptr
    {take("%call", "!llvm.ptr", x=Word.ADDRESS)}
    {take("%call", rows=Word.ROWS, width=Word.WIDTH, stride=Word.STRIDE, code=Word.CODE)}
    {take("%call", inner_rows=Word.INNER, along=Word.ALONG, inner=Word.INNER_STRIDE)}
    {take("%slot", "!llvm.ptr", function=TopkGpuWords.FUNCTION)}
    {take("%slot", threads=TopkGpuWords.WORKGROUP, together=TopkGpuWords.ROWS, shared=TopkGpuWords.SHARED)}
    %out_outer = llvm.mul %k, %inner_rows : i64
    %apart = llvm.and %code, %any_bit : i64
    %is_apart = llvm.icmp "ne" %apart, %zero : i64
    llvm.cond_br %is_apart, ^apart, ^in_rows
  ^in_rows:
    {write(pointers((*first, "%stride", "%k", "%k")))}
    llvm.br ^place(%zero, %in_rows : i64, i64)
  ^apart:
    {write(pointers(apart))}
    llvm.br ^place(%zero, %most : i64, i64)
  ^place(%i: i64, %count: i64):
    %more = llvm.icmp "ult" %i, %count : i64
    llvm.cond_br %more, ^value, ^where
  ^value:
    %value = llvm.getelementptr %words[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    {put("%value", "%places", "%i", "!llvm.ptr")}
    %i2 = llvm.add %i, %one : i64
    llvm.br ^place(%i2, %count : i64, i64)
  ^where:
    {device_of("%device", "%code")}
    {call("%r0", door.CURRENT, "%here_: !llvm.ptr")}
    %here = llvm.load %here_ : !llvm.ptr -> i32
    %at_home = llvm.icmp "eq" %here, %device : i32
    llvm.cond_br %at_home, ^go(%null : !llvm.ptr), ^away
  ^away:
    {call("%r1", "aoti_torch_create_device_guard", "%device: i32, %guard_: !llvm.ptr")}
    %guarded = llvm.icmp "eq" %r1, %none : i32
    %guard1 = llvm.load %guard_ : !llvm.ptr -> !llvm.ptr
    llvm.cond_br %guarded, ^go(%guard1 : !llvm.ptr), ^no
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  ^go(%guard: !llvm.ptr):
    {call("%r2", door.STREAM, "%device: i32, %stream_: !llvm.ptr")}
    %stream = llvm.load %stream_ : !llvm.ptr -> !llvm.ptr
    %up = llvm.add %rows, %together : i64
    %up1 = llvm.sub %up, %one : i64
    %groups = llvm.udiv %up1, %together : i64
    %grid = llvm.trunc %groups : i64 to i32
    %threads32 = llvm.trunc %threads : i64 to i32
    %shared32 = llvm.trunc %shared : i64 to i32
    {call("%launched", "launch", "%function: !llvm.ptr, %grid: i32, %single: i32, %single: i32, %threads32: i32, "
          "%single: i32, %single: i32, %shared32: i32, %stream: !llvm.ptr, %places: !llvm.ptr, %null: !llvm.ptr")}
    %status = llvm.or %r2, %launched : i32
    %free = llvm.icmp "eq" %guard, %null : !llvm.ptr
    llvm.cond_br %free, ^done, ^leave_guard
  ^leave_guard:
    {call("%r3", "aoti_torch_delete_device_guard", "%guard: !llvm.ptr")}
    llvm.br ^done
  ^done:
    %fine = llvm.icmp "eq" %status, %none : i32
    llvm.return %fine : i1
  }}"""  # fmt: skip
