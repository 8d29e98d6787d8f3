"""The doors from PyTorch's dispatcher into top-k kernels, of the CPU and of a GPU: two functions each with which a
library registers a kernel.

    void topk(StableIValue *stack, uint64_t arguments, uint64_t results)         aten::topk
    void topk_values(StableIValue *stack, uint64_t arguments, uint64_t results)  aten::topk.values, the one with out=

This is the convention of `aoti_torch_library_impl` (torch/csrc/inductor/aoti_torch/c/shim.h), PyTorch's C interface
that stays the same from release to release: a call costs no Python and needs no GIL. What a top-k of a few hundred
elements takes is less than a function registered from Python costs by itself.

A call is looked up in a table of slots, by width, k and what `code_of` packs. The slot says who serves it: a kernel,
called right here, or ATen. What no slot knows is asked of `resolve` (Python) once. Kernels want rows one distance apart
on either side of the dimension, or, on the CPU, at two distances before it; there of others a dense copy is made.
Everything else, errors too, is `at::cpu::topk`'s or `at::cuda::topk`'s. C++ exceptions of ATen pass through; the
handles that the stack owned are given back on each way out.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from ..launch import torch_door as door
from ..launch.torch_door import TopkWords
from .x86_door import (
    PERSONALITY,
    boxed,
    call,
    compile_door,
    constants,
    dropped,
    find,
    fresh,
    invoke,
    module,
    put,
    room,
    room_for_fresh,
    served,
    take,
    unwinding,
)
from .x86_door_axes import collapse, lay_out
from .x86_topk_call import Answer, Word, copied, dense, rows
from .x86_topk_gpu import device_of, launch, names, python

ENTRIES = ("topk", "topk_values")
LINE = 64  # bytes: alignment of memory that kernels are handed


def build() -> CodeObject:
    """The door as an object with the entries `ENTRIES`. It serves any kernel of templates/topk for x86."""
    functions = (collapse(), rows(), copied(), find(), _launch(), dense(), _topk(), _topk_values())
    return compile_door("topk", module("topk", *functions), ENTRIES[0])


def build_gpu(device_type: int) -> CodeObject:
    """The same for a GPU's tensors, of a device type by DeviceType's number (c10/core/DeviceType.h), and kernels that
    x86_topk_gpu.py can launch."""
    functions = [names(), collapse(), rows(device_type), find(), launch(), dense(device_type)]
    functions += [_topk(device_type), _topk_values(device_type)]
    return compile_door("topk", module("topk", *functions), ENTRIES[0])


def _launch() -> str:
    """launch(slot, call, values, indices, k): runs the slot's kernel on dense results; 0 if memory ran out."""
    pointers = ", ".join(["!llvm.ptr"] * 3)
    apart = ", ".join(["i64"] * 9)
    plain, split = "!llvm.ptr, i32) -> ()", "i32, !llvm.ptr, !llvm.ptr, i32) -> ()"
    last, anywhere = f"({pointers}, i32, i32, i32, i64, i64, i64", f"({pointers}, i32, i32, i32, i32, {apart}"
    first = "%x, %values, %indices, %rows32, %width32, %k32"
    in_rows = f"{first}, %stride, %k, %k"
    out = "%out_outer, %out_along, %out_inner"
    with_strides = f"{first}, %inner32, %stride, %along, %inner, {out}, {out}"
    return f"""
  llvm.func internal @memory(%bytes: i64) -> !llvm.ptr {{
    {constants(zero=0, line=LINE, up=LINE - 1, down=-LINE)}
    %any = llvm.icmp "ne" %bytes, %zero : i64
    llvm.cond_br %any, ^some, ^none
  ^some:
    %a = llvm.add %bytes, %up : i64
    %b = llvm.and %a, %down : i64
    {call("%p", "aligned_alloc", "%line: i64, %b: i64", "!llvm.ptr")}
    llvm.return %p : !llvm.ptr
  ^none:
    %null = llvm.mlir.zero : !llvm.ptr
    llvm.return %null : !llvm.ptr
  }}
  llvm.func internal @launch(
    %slot: !llvm.ptr, %call: !llvm.ptr, %values: !llvm.ptr, %indices: !llvm.ptr, %k: i64
  ) -> i1 {{
    {constants(zero=0, one=1, any_bit=1 << door.ANY_BIT)}
    %null = llvm.mlir.zero : !llvm.ptr
    %false = llvm.mlir.constant(false) : i1
    %true = llvm.mlir.constant(true) : i1
    %nothing = llvm.mlir.constant(0 : i32) : i32
    {take("%call", "!llvm.ptr", x=Word.ADDRESS)}
    {take("%call", rows=Word.ROWS, width=Word.WIDTH, stride=Word.STRIDE, code=Word.CODE)}
    {take("%call", inner_rows=Word.INNER, along=Word.ALONG, inner=Word.INNER_STRIDE)}
    {take("%call", out_along=Word.OUT_ALONG, out_inner=Word.OUT_INNER)}
    {take("%slot", "!llvm.ptr", kernel=TopkWords.KERNEL)}
    {take("%slot", most=TopkWords.THREADS, parts=TopkWords.PARTS)}
    {take("%slot", row_workspace=TopkWords.WORKSPACE, private=TopkWords.PRIVATE)}
    %rows32 = llvm.trunc %rows : i64 to i32
    %width32 = llvm.trunc %width : i64 to i32
    %k32 = llvm.trunc %k : i64 to i32
    %parts32 = llvm.trunc %parts : i64 to i32
    %inner32 = llvm.trunc %inner_rows : i64 to i32
    %out_outer = llvm.mul %k, %inner_rows : i64
    %apart = llvm.and %code, %any_bit : i64
    %is_apart = llvm.icmp "ne" %apart, %zero : i64
    {call("%allowed", "omp_get_max_threads")}
    %most32 = llvm.trunc %most : i64 to i32
    %threads = llvm.intr.smin(%allowed, %most32) : (i32, i32) -> i32
    %threads64 = llvm.zext %threads : i32 to i64
    %private_bytes = llvm.mul %private, %threads64 : i64
    %shared_bytes = llvm.mul %row_workspace, %rows : i64
    %own = llvm.call @memory(%private_bytes) : (i64) -> !llvm.ptr
    %space = llvm.call @memory(%shared_bytes) : (i64) -> !llvm.ptr
    %own_null = llvm.icmp "eq" %own, %null : !llvm.ptr
    %space_null = llvm.icmp "eq" %space, %null : !llvm.ptr
    %own_wanted = llvm.icmp "ne" %private_bytes, %zero : i64
    %space_wanted = llvm.icmp "ne" %shared_bytes, %zero : i64
    %bad0 = llvm.and %own_null, %own_wanted : i1
    %bad1 = llvm.and %space_null, %space_wanted : i1
    %bad = llvm.or %bad0, %bad1 : i1
    llvm.cond_br %bad, ^give_back(%false : i1), ^go
  ^go:
    %is_split = llvm.icmp "ne" %parts, %zero : i64
    llvm.cond_br %is_split, ^split, ^plain
  ^plain:
    llvm.cond_br %is_apart, ^plain_apart, ^plain_rows
  ^plain_rows:
    llvm.call %kernel({in_rows}, %own, %threads) : !llvm.ptr, {last}, {plain}
    llvm.br ^give_back(%true : i1)
  ^plain_apart:
    llvm.call %kernel({with_strides}, %own, %threads) : !llvm.ptr, {anywhere}, {plain}
    llvm.br ^give_back(%true : i1)
  ^split:
    {call("%ignored", "memset", "%space: !llvm.ptr, %nothing: i32, %shared_bytes: i64", "!llvm.ptr")}
    llvm.cond_br %is_apart, ^split_apart, ^split_rows
  ^split_rows:
    llvm.call %kernel({in_rows}, %parts32, %space, %own, %threads) : !llvm.ptr, {last}, {split}
    llvm.br ^give_back(%true : i1)
  ^split_apart:
    llvm.call %kernel({with_strides}, %parts32, %space, %own, %threads) : !llvm.ptr, {anywhere}, {split}
    llvm.br ^give_back(%true : i1)
  ^give_back(%done: i1):
    {call("", "free", "%own: !llvm.ptr", "")}
    {call("", "free", "%space: !llvm.ptr", "")}
    llvm.return %done : i1
  }}"""


def _look_up(found: str) -> str:
    """To block `found` with the %slot that serves the call, or to ^aten."""
    return f"""
    {take("%call", width=Word.WIDTH, code=Word.CODE, rows=Word.ROWS)}
    {served("%width, %k, %code, %rows", found, "^aten")}"""


def _begin() -> str:
    """The call's arguments off the stack (booleans fill a byte of their word); %answer: whether kernels may serve."""
    return f"""
    {take("%stack", "!llvm.ptr", h=0)}
    {take("%stack", k=1, dim=2, largest_=3, sorted_=4)}
    {constants(zero=0, one=1, eight=8, cells=len(Word))}
    %largest = llvm.and %largest_, %one : i64
    %sorted = llvm.and %sorted_, %one : i64
    %largest8 = llvm.trunc %largest : i64 to i8
    %sorted8 = llvm.trunc %sorted : i64 to i8
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    {room("said")}
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    %answer = llvm.call @rows(%h, %k, %dim, %largest, %call) : (!llvm.ptr, i64, i64, i64, !llvm.ptr) -> i64
    {constants(kernels=Answer.KERNELS, nothing=Answer.NOTHING)}"""


def _run(slot: str, values: str, indices: str, done: str, failed: str) -> str:
    """The slot's kernel on results at these addresses (i64)."""
    return f"""
    %vp = llvm.inttoptr {values} : i64 to !llvm.ptr
    %np = llvm.inttoptr {indices} : i64 to !llvm.ptr
    %ran = llvm.call @launch({slot}, %call, %vp, %np, %k) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> i1
    llvm.cond_br %ran, {done}, {failed}"""


def _topk(gpu: int | None = None) -> str:
    chosen = """
    %is_chosen = llvm.icmp "eq" %i, %at_dim : i64
    %size = llvm.select %is_chosen, %k, %s : i1, i64"""
    released = "\n    llvm.call @give_back(%copy) : (!llvm.ptr) -> ()" if gpu is None else ""
    copying = """
  ^copy:
    %copied = llvm.call @copied(%h, %call, %copy) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %copied, ^results(%slot : !llvm.ptr), ^aten"""
    found = _look_up("^lies" if gpu is None else "^whose")
    found += python("topk", "^lies") if gpu is not None else ""
    return f"""
  llvm.func @topk(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {_begin()}
    {constants(rank_most=door.DIMENSIONS_MOST)}
    {room_for_fresh("v", "n")}
    {room("copy")}
    llvm.store %null, %copy : !llvm.ptr, !llvm.ptr
    %osz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %ost = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %type = llvm.mlir.constant({door.CPU if gpu is None else gpu} : i32) : i32
    %i64_type = llvm.mlir.constant({door.I64} : i32) : i32
    %ask = llvm.icmp "eq" %answer, %kernels : i64
    llvm.cond_br %ask, ^find, ^not_asked
  ^not_asked:
    %empty = llvm.icmp "eq" %answer, %nothing : i64
    llvm.cond_br %empty, ^results(%null : !llvm.ptr), ^aten
  ^find:
    {found}
  ^lies:
    {take("%call", uneven=Word.UNEVEN)}
    %is_uneven = llvm.icmp "ne" %uneven, %zero : i64
    llvm.cond_br %is_uneven, {"^copy" if gpu is None else "^aten"}, ^results(%slot : !llvm.ptr)
    {copying if gpu is None else ""}
  ^results(%who: !llvm.ptr):
    {take("%call", nd=Word.RANK, dt=Word.TYPE, at_dim=Word.DIMENSION)}
    {take("%call", "!llvm.ptr", sz=Word.SIZES)}
    {lay_out("%nd", "%sz", "^make", [("%size", "%osz", "%ost")], chosen)}
  ^make:
    %dt32 = llvm.trunc %dt : i64 to i32
    {take("%call", code_=Word.CODE)}
    {device_of("%number", "%code_") if gpu is not None else "%number = llvm.mlir.constant(0 : i32) : i32"}
    {fresh("v", "%nd, %osz, %ost, %dt32", "%type, %number", "^aten")}
    {fresh("n", "%nd, %osz, %ost, %i64_type", "%type, %number", "^drop_values")}
    %selects = llvm.icmp "ne" %who, %null : !llvm.ptr
    llvm.cond_br %selects, ^run, ^leave(%v, %n : !llvm.ptr, !llvm.ptr)
  ^run:
    {_run("%who", "%v_at", "%n_at", "^leave(%v, %n : !llvm.ptr, !llvm.ptr)", "^drop")}
  ^drop:
    {dropped("%n")}
    llvm.br ^drop_values
  ^drop_values:
    {dropped("%v")}
    llvm.br ^aten
  ^aten:
    {released}
    {invoke(door.TOPK, "%both: !llvm.ptr, %h: !llvm.ptr, %k: i64, %dim: i64, %largest8: i8, %sorted8: i8",
             "^boxes", "^unwind")}
  ^boxes:
    {boxed("box", 1, 0)}
    llvm.br ^leave(%box0, %box1 : !llvm.ptr, !llvm.ptr)
  ^leave(%out0: !llvm.ptr, %out1: !llvm.ptr):
    {released}
    {dropped("%h")}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr")}
    llvm.return
    {unwinding(released + dropped("%h"))}
  }}"""  # fmt: skip


def _topk_values(gpu: int | None = None) -> str:
    found = _look_up("^run" if gpu is None else "^whose")
    found += python("topk_values", "^run") if gpu is not None else ""
    fits = lambda result, handle, kind, shift: (
        f"%{result} = llvm.call @dense({handle}, %call, %k, {kind}, {shift}, {handle}_at)\n"
        "             : (!llvm.ptr, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1"
    )
    return f"""
  llvm.func @topk_values(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {_begin()}
    {take("%stack", "!llvm.ptr", v=5, n=6)}
    {constants(two=2, integer=door.I64, integer_shift=door.LOG2_BYTES[door.I64])}
    %v_at = llvm.alloca %two x i64 : (i64) -> !llvm.ptr
    %n_at = llvm.alloca %two x i64 : (i64) -> !llvm.ptr
    %ask = llvm.icmp "eq" %answer, %kernels : i64
    llvm.cond_br %ask, ^lies, ^aten
  ^lies:
    {take("%call", uneven=Word.UNEVEN, type=Word.TYPE, shift=Word.SHIFT)}
    %even = llvm.icmp "eq" %uneven, %zero : i64
    llvm.cond_br %even, ^values, ^aten
  ^values:
    {fits("good0", "%v", "%type", "%shift")}
    llvm.cond_br %good0, ^indices, ^aten
  ^indices:
    {fits("good1", "%n", "%integer", "%integer_shift")}
    llvm.cond_br %good1, ^apart, ^aten
  ^apart:
    {take("%v_at", v0=0, v1=1)}
    {take("%n_at", n0=0, n1=1)}
    %left = llvm.icmp "ule" %v1, %n0 : i64
    %right = llvm.icmp "uge" %v0, %n1 : i64
    %free = llvm.or %left, %right : i1
    llvm.cond_br %free, ^find, ^aten
  ^find:
    {found}
  ^run:
    {_run("%slot", "%v0", "%n0", "^leave", "^aten")}
  ^aten:
    {invoke(door.TOPK_OUT, "%both: !llvm.ptr, %v: !llvm.ptr, %n: !llvm.ptr, %h: !llvm.ptr, %k: i64, %dim: i64, "
             "%largest8: i8, %sorted8: i8", "^leave", "^unwind")}
  ^leave:
    {dropped("%h")}
    {put("%v", "%stack", 0, "!llvm.ptr")}
    {put("%n", "%stack", 1, "!llvm.ptr")}
    llvm.return
    {unwinding(dropped("%h", "%v", "%n"))}
  }}"""  # fmt: skip
