"""How the door for top-k (x86_topk_door.py) runs a kernel on a GPU: MLIR text.

A slot names a kernel that is one launch, whose arguments are those of templates/topk/arguments.py without a workspace,
and whose grid is one workgroup for so many rows. What needs more (workspace that belongs to a stream or a graph) goes
on to an operator of Python's with the same arguments.
"""

from __future__ import annotations

from ..launch import torch_door as door
from ..launch.torch_door import TopkGpuWords
from . import x86_gpu_launch as gpu
from .x86_door import constants, put, pythons, room, strings, take
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
    {room(*gpu.ROOM)}
    {constants(zero=0, one=1, any_bit=1 << door.ANY_BIT, most=APART, in_rows=IN_ROWS)}
    {gpu.CONSTANTS}
    %words = llvm.alloca %most x i64 : (i64) -> !llvm.ptr
    %places = llvm.alloca %most x i64 : (i64) -> !llvm.ptr
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
    {gpu.place("%words", "^where")}
  ^where:
    {device_of("%device", "%code")}
    {gpu.on_device("%device", "^go", "^no")}
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  ^go(%guard: !llvm.ptr):
    {gpu.stream("%has_stream", "%device")}
    %up = llvm.add %rows, %together : i64
    %up1 = llvm.sub %up, %one : i64
    %groups = llvm.udiv %up1, %together : i64
    %grid = llvm.trunc %groups : i64 to i32
    %threads32 = llvm.trunc %threads : i64 to i32
    %shared32 = llvm.trunc %shared : i64 to i32
    {gpu.launched("%launched", "%function", "%grid", "%single", "%threads32", "%shared32")}
    %status = llvm.or %has_stream, %launched : i32
    {gpu.given_back("^done")}
  ^done:
    %fine = llvm.icmp "eq" %status, %none : i32
    llvm.return %fine : i1
  }}"""
