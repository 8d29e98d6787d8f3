"""The doors from PyTorch's dispatcher into top-k kernels, of the CPU and of a GPU: two functions each with which a
library registers a kernel.

    void topk(StableIValue *stack, uint64_t arguments, uint64_t results)         aten::topk
    void topk_values(StableIValue *stack, uint64_t arguments, uint64_t results)  aten::topk.values, the one with out=

This is the convention of `aoti_torch_library_impl` (torch/csrc/inductor/aoti_torch/c/shim.h), PyTorch's C interface
that stays the same from release to release: a call costs no Python and needs no GIL. What a top-k of a few hundred
elements takes is less than a function registered from Python costs by itself.

A call whose elements lie as kernels want them (strided, rows one distance apart on either side of the dimension) is
looked up in a table of slots, by width, k and what `code_of` packs. The slot says who serves it: a kernel, called right
here, or ATen. What no slot knows is asked of `resolve` (Python) once. Everything else, errors too, is
`at::cpu::topk`'s. C++ exceptions of ATen pass through; the handles that the stack owned are given back on each way out.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from ..launch import torch_door as door
from ..launch.torch_door import TopkWords
from .x86_door import PERSONALITY, call, compile_door, constants, find, invoke, module, put, room, say, word
from .x86_topk_call import WORDS, collapse, dense, rows
from .x86_topk_gpu import device_of, launch, names, python

ENTRIES = ("topk", "topk_values")
LINE = 64  # bytes: alignment of memory that kernels are handed


def build() -> CodeObject:
    """The door as an object with the entries `ENTRIES`. It serves any kernel of templates/topk for x86."""
    functions = (collapse(), rows(), find(), _launch(), dense(), _topk(), _topk_values())
    return compile_door("topk", module("topk", *functions), ENTRIES[0])


def build_gpu(device_type: int) -> CodeObject:
    """The same for a GPU's tensors, of a device type by DeviceType's number (c10/core/DeviceType.h), and kernels that
    x86_topk_gpu.py can launch."""
    functions = (names(), collapse(), rows(device_type), find(), launch(), dense(device_type))
    functions = (*functions, _topk(device_type), _topk_values(device_type))
    return compile_door("topk", module("topk", *functions), ENTRIES[0])


def _launch() -> str:
    """launch(slot, call, values, indices, k): runs the slot's kernel on dense results; 0 if memory ran out."""
    pointers = ", ".join(["!llvm.ptr"] * 3)
    apart = ", ".join(["i64"] * 9)
    plain, split = "!llvm.ptr, i32) -> ()", "i32, !llvm.ptr, !llvm.ptr, i32) -> ()"
    last, anywhere = f"({pointers}, i32, i32, i32, i64, i64, i64", f"({pointers}, i32, i32, i32, i32, {apart}"
    first = "%x, %values, %indices, %rows32, %width32, %k32"
    in_rows = f"{first}, %stride, %k, %k"
    out = "%out_outer, %inner_rows, %one"
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
    {word("%x", "%call", 0, "!llvm.ptr")}
    {word("%rows", "%call", 1)}
    {word("%width", "%call", 2)}
    {word("%stride", "%call", 3)}
    {word("%code", "%call", 4)}
    {word("%inner_rows", "%call", 9)}
    {word("%along", "%call", 10)}
    {word("%inner", "%call", 11)}
    {word("%kernel", "%slot", TopkWords.KERNEL.value, "!llvm.ptr")}
    {word("%most", "%slot", TopkWords.THREADS.value)}
    {word("%parts", "%slot", TopkWords.PARTS.value)}
    {word("%row_workspace", "%slot", TopkWords.WORKSPACE.value)}
    {word("%private", "%slot", TopkWords.PRIVATE.value)}
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


def _arguments() -> str:
    """The call's arguments off the stack. Booleans fill a byte of their word."""
    return f"""
    {word("%h", "%stack", 0, "!llvm.ptr")}
    {word("%k", "%stack", 1)}
    {word("%dim", "%stack", 2)}
    {word("%largest_", "%stack", 3)}
    {word("%sorted_", "%stack", 4)}
    {constants(zero=0, one=1, bit=1)}
    %largest = llvm.and %largest_, %bit : i64
    %sorted = llvm.and %sorted_, %bit : i64
    %largest8 = llvm.trunc %largest : i64 to i8
    %sorted8 = llvm.trunc %sorted : i64 to i8"""


def _topk(gpu: int | None = None) -> str:
    return f"""
  llvm.func @topk(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {_arguments()}
    %eight = llvm.mlir.constant(8 : i64) : i64
    %rank_most = llvm.mlir.constant({door.DIMENSIONS_MOST} : i64) : i64
    %cells = llvm.mlir.constant({WORDS} : i64) : i64
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %osz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %ost = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    {room("v_", "i_", "vp_", "ip_", "said")}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %type = llvm.mlir.constant({door.CPU if gpu is None else gpu} : i32) : i32
    %i64_type = llvm.mlir.constant({door.I64} : i32) : i32
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    %asked = llvm.call @rows(%h, %k, %dim, %largest, %call) : (!llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %asked, ^find, ^aten
  ^find:
    {word("%width", "%call", 2)}
    {word("%code", "%call", 4)}
    {word("%rows", "%call", 1)}
    %slot = llvm.call @find(%width, %k, %code, %rows, %said) : (i64, i64, i64, i64, !llvm.ptr) -> !llvm.ptr
    %served = llvm.icmp "ne" %slot, %null : !llvm.ptr
    llvm.cond_br %served, {"^results" if gpu is None else "^whose"}, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
    {python("topk", "^results") if gpu is not None else ""}
  ^results:
    {word("%nd", "%call", 5)}
    {word("%sz", "%call", 6, "!llvm.ptr")}
    {word("%dt", "%call", 7)}
    {word("%at_dim", "%call", 8)}
    llvm.br ^axis(%nd, %one : i64, i64)
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^empty
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%outer", "%sz", "%i")}
    %chosen = llvm.icmp "eq" %i, %at_dim : i64
    %s = llvm.select %chosen, %k, %outer : i1, i64
    {put("%s", "%osz", "%i")}
    {put("%next", "%ost", "%i")}
    %next2 = llvm.mul %next, %s : i64
    llvm.br ^axis(%i, %next2 : i64, i64)
  ^empty:
    %dt32 = llvm.trunc %dt : i64 to i32
    {device_of("%number", "%code") if gpu is not None else "%number = llvm.mlir.constant(0 : i32) : i32"}
    {call("%e0", "aoti_torch_empty_strided", "%nd: i64, %osz: !llvm.ptr, %ost: !llvm.ptr, %dt32: i32, %type: i32, "
           "%number: i32, %v_: !llvm.ptr")}
    %got0 = llvm.icmp "eq" %e0, %fine : i32
    llvm.cond_br %got0, ^empty2, ^aten
  ^empty2:
    %v = llvm.load %v_ : !llvm.ptr -> !llvm.ptr
    {call("%e1", "aoti_torch_empty_strided", "%nd: i64, %osz: !llvm.ptr, %ost: !llvm.ptr, %i64_type: i32, %type: i32, "
           "%number: i32, %i_: !llvm.ptr")}
    %got1 = llvm.icmp "eq" %e1, %fine : i32
    llvm.cond_br %got1, ^run, ^drop_values
  ^run:
    %n = llvm.load %i_ : !llvm.ptr -> !llvm.ptr
    {call("%e2", "aoti_torch_get_data_ptr", "%v: !llvm.ptr, %vp_: !llvm.ptr")}
    {call("%e3", "aoti_torch_get_data_ptr", "%n: !llvm.ptr, %ip_: !llvm.ptr")}
    %vp = llvm.load %vp_ : !llvm.ptr -> !llvm.ptr
    %ip = llvm.load %ip_ : !llvm.ptr -> !llvm.ptr
    %ran = llvm.call @launch(%slot, %call, %vp, %ip, %k) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> i1
    llvm.cond_br %ran, ^leave(%v, %n : !llvm.ptr, !llvm.ptr), ^drop
  ^drop:
    {call("%e4", "aoti_torch_delete_tensor_object", "%n: !llvm.ptr")}
    llvm.br ^drop_values
  ^drop_values:
    {call("%e5", "aoti_torch_delete_tensor_object", "%v: !llvm.ptr")}
    llvm.br ^aten
  ^aten:
    {invoke(door.TOPK, "%both: !llvm.ptr, %h: !llvm.ptr, %k: i64, %dim: i64, %largest8: i8, %sorted8: i8",
             "^boxes", "^unwind")}
  ^boxes:
    {call("%box0", "malloc", "%eight: i64", "!llvm.ptr")}
    {call("%box1", "malloc", "%eight: i64", "!llvm.ptr")}
    {word("%second", "%both", 0)}
    {word("%first", "%both", 1)}
    {put("%first", "%box0", 0)}
    {put("%second", "%box1", 0)}
    llvm.br ^leave(%box0, %box1 : !llvm.ptr, !llvm.ptr)
  ^leave(%out0: !llvm.ptr, %out1: !llvm.ptr):
    {call("%e10", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr")}
    llvm.return
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {call("%e11", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>
  }}"""  # fmt: skip


def _topk_values(gpu: int | None = None) -> str:
    return f"""
  llvm.func @topk_values(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {_arguments()}
    {word("%v", "%stack", 5, "!llvm.ptr")}
    {word("%n", "%stack", 6, "!llvm.ptr")}
    %eight = llvm.mlir.constant(8 : i64) : i64
    %cells = llvm.mlir.constant({WORDS} : i64) : i64
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    %v_at = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    %n_at = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    {room("said")}
    {constants(four=4, two=2, f32=door.F32, integer=door.I64)}
    %null = llvm.mlir.zero : !llvm.ptr
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    %asked = llvm.call @rows(%h, %k, %dim, %largest, %call) : (!llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %asked, ^values, ^aten
  ^values:
    {word("%type", "%call", 7)}
    %is32 = llvm.icmp "eq" %type, %f32 : i64
    %bytes = llvm.select %is32, %four, %two : i1, i64
    %good0 = llvm.call @dense(%v, %call, %k, %type, %bytes, %v_at)
             : (!llvm.ptr, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %good0, ^indices, ^aten
  ^indices:
    %good1 = llvm.call @dense(%n, %call, %k, %integer, %eight, %n_at)
             : (!llvm.ptr, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %good1, ^apart, ^aten
  ^apart:
    {word("%v0", "%v_at", 0)}
    {word("%v1", "%v_at", 1)}
    {word("%n0", "%n_at", 0)}
    {word("%n1", "%n_at", 1)}
    %left = llvm.icmp "ule" %v1, %n0 : i64
    %right = llvm.icmp "uge" %v0, %n1 : i64
    %free = llvm.or %left, %right : i1
    llvm.cond_br %free, ^find, ^aten
  ^find:
    {word("%width", "%call", 2)}
    {word("%code", "%call", 4)}
    {word("%rows", "%call", 1)}
    %slot = llvm.call @find(%width, %k, %code, %rows, %said) : (i64, i64, i64, i64, !llvm.ptr) -> !llvm.ptr
    %served = llvm.icmp "ne" %slot, %null : !llvm.ptr
    llvm.cond_br %served, {"^run" if gpu is None else "^whose"}, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
    {python("topk_values", "^run") if gpu is not None else ""}
  ^run:
    %vp = llvm.inttoptr %v0 : i64 to !llvm.ptr
    %np = llvm.inttoptr %n0 : i64 to !llvm.ptr
    %ran = llvm.call @launch(%slot, %call, %vp, %np, %k) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> i1
    llvm.cond_br %ran, ^leave, ^aten
  ^aten:
    {invoke(door.TOPK_OUT, "%both: !llvm.ptr, %v: !llvm.ptr, %n: !llvm.ptr, %h: !llvm.ptr, %k: i64, %dim: i64, "
             "%largest8: i8, %sorted8: i8", "^leave", "^unwind")}
  ^leave:
    {call("%e0", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    {put("%v", "%stack", 0, "!llvm.ptr")}
    {put("%n", "%stack", 1, "!llvm.ptr")}
    llvm.return
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {call("%e1", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    {call("%e2", "aoti_torch_delete_tensor_object", "%v: !llvm.ptr")}
    {call("%e3", "aoti_torch_delete_tensor_object", "%n: !llvm.ptr")}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>
  }}"""  # fmt: skip
