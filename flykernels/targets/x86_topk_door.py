"""The door from PyTorch's dispatcher into x86 top-k kernels: two functions with which a library registers a kernel.

    void topk(StableIValue *stack, uint64_t arguments, uint64_t results)         aten::topk
    void topk_values(StableIValue *stack, uint64_t arguments, uint64_t results)  aten::topk.values, the one with out=

This is the convention of `aoti_torch_library_impl` (torch/csrc/inductor/aoti_torch/c/shim.h), PyTorch's C interface that
stays the same from release to release: a call costs no Python and needs no GIL. What a top-k of a few hundred elements
takes is less than a function registered from Python costs by itself.

A call whose elements lie as kernels want them (strided, last dimension, unit stride, rows one distance apart) is looked
up in a table of slots, by width, k and what `code_of` packs. The slot says who serves it: a kernel, called right here,
or ATen. What no slot knows is asked of `resolve` (Python) once. Everything else, errors too, is `at::cpu::topk`'s.
C++ exceptions of ATen pass through; the handles that the stack owned are given back on every way out.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from ..launch import torch_door as door
from ..launch.torch_door import TopkWords
from .x86_door import call, compile_door, constants, find, invoke, module, put, room, say, word

ENTRIES = ("topk", "topk_values")
VECTOR = 16  # bytes: rows at multiples of it are read with the widest loads
LINE = 64  # bytes: alignment of memory that kernels are handed


def build() -> CodeObject:
    """The door as an object with the entries `ENTRIES`. It serves any kernel of templates/topk for x86."""
    functions = (_rows(), find(), _launch(), _contiguous(), _topk(), _topk_values())
    return compile_door("topk", module("topk", *functions), ENTRIES[0])


def _rows() -> str:
    """rows(handle, k, dim, call): 1 if kernels may be asked, and then call = {address, rows, width, row stride, code,
    rank, sizes, scalar type}."""
    return f"""
  llvm.func internal @rows(%h: !llvm.ptr, %k: i64, %dim: i64, %largest: i64, %call: !llvm.ptr) -> i1 {{
    {room("nd_", "dt_", "sz_", "st_", "at_")}
    {constants(zero=0, one=1, minus=-1, f16=door.F16, f32=door.F32, bf16=door.BF16, most=door.ELEMENTS_MOST)}
    {constants(rank_most=door.DIMENSIONS_MOST, low=VECTOR - 1, two=2, sixtyfour=64, largest_bit=door.LARGEST_BIT)}
    {constants(misaligned_bit=door.MISALIGNED_BIT, rows_shift=door.ROWS_SHIFT, threads_shift=door.THREADS_SHIFT)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    {call("%r0", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%r1", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    {call("%r2", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    {call("%r3", "aoti_torch_get_strides", "%h: !llvm.ptr, %st_: !llvm.ptr")}
    %r01 = llvm.or %r0, %r1 : i32
    %r23 = llvm.or %r2, %r3 : i32
    %failed = llvm.or %r01, %r23 : i32
    %none = llvm.mlir.constant(0 : i32) : i32
    %read = llvm.icmp "eq" %failed, %none : i32
    llvm.cond_br %read, ^type, ^no
  ^type:
    %nd = llvm.load %nd_ : !llvm.ptr -> i64
    %dt = llvm.load %dt_ : !llvm.ptr -> i64
    %sz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %st = llvm.load %st_ : !llvm.ptr -> !llvm.ptr
    %is16 = llvm.icmp "eq" %dt, %f16 : i64
    %is32 = llvm.icmp "eq" %dt, %f32 : i64
    %isb = llvm.icmp "eq" %dt, %bf16 : i64
    %either = llvm.or %is16, %is32 : i1
    %typed = llvm.or %either, %isb : i1
    %last = llvm.sub %nd, %one : i64
    %d0 = llvm.icmp "eq" %dim, %minus : i64
    %d1 = llvm.icmp "eq" %dim, %last : i64
    %along = llvm.or %d0, %d1 : i1
    %has = llvm.icmp "sge" %last, %zero : i64
    %few = llvm.icmp "sle" %nd, %rank_most : i64
    %a0 = llvm.and %typed, %along : i1
    %a1 = llvm.and %has, %few : i1
    %a = llvm.and %a0, %a1 : i1
    llvm.cond_br %a, ^width, ^no
  ^width:
    {word("%width", "%sz", "%last")}
    {word("%unit", "%st", "%last")}
    %u = llvm.icmp "eq" %unit, %one : i64
    %k1 = llvm.icmp "sge" %k, %one : i64
    %k2 = llvm.icmp "sle" %k, %width : i64
    %w1 = llvm.icmp "sle" %width, %most : i64
    %b0 = llvm.and %u, %k1 : i1
    %b1 = llvm.and %k2, %w1 : i1
    %b = llvm.and %b0, %b1 : i1
    llvm.cond_br %b, ^axis(%last, %one, %width, %zero : i64, i64, i64, i64), ^no
  ^axis(%above: i64, %rows: i64, %stride: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^all
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    %single = llvm.icmp "eq" %s, %one : i64
    llvm.cond_br %single, ^axis(%i, %rows, %stride, %next : i64, i64, i64, i64), ^several
  ^several:
    %first = llvm.icmp "eq" %rows, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %fits = llvm.or %first, %follows : i1
    %some = llvm.icmp "sgt" %s, %zero : i64
    %c = llvm.and %fits, %some : i1
    %stride2 = llvm.select %first, %t, %stride : i1, i64
    %next2 = llvm.mul %t, %s : i64
    %rows2 = llvm.mul %rows, %s : i64
    llvm.cond_br %c, ^axis(%i, %rows2, %stride2, %next2 : i64, i64, i64, i64), ^no
  ^all:
    %elements = llvm.mul %rows, %width : i64
    %not_many = llvm.icmp "ule" %elements, %most : i64
    llvm.cond_br %not_many, ^describe, ^no
  ^describe:
    {call("%r4", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at_: !llvm.ptr")}
    %address = llvm.load %at_ : !llvm.ptr -> i64
    %shift = llvm.select %is32, %two, %one : i1, i64
    %row_bytes = llvm.shl %stride, %shift : i64
    %both = llvm.or %address, %row_bytes : i64
    %odd = llvm.and %both, %low : i64
    %isodd = llvm.icmp "ne" %odd, %zero : i64
    %misaligned = llvm.zext %isodd : i1 to i64
    %before = llvm.sub %rows, %one : i64
    %zeros = "llvm.intr.ctlz"(%before) <{{is_zero_poison = false}}> : (i64) -> i64
    %bucket = llvm.sub %sixtyfour, %zeros : i64
    llvm.store %zero, %at_ : i64, !llvm.ptr
    {call("%r5", "torch_get_num_threads", "%at_: !llvm.ptr")}
    %threads32 = llvm.load %at_ : !llvm.ptr -> i32
    %threads = llvm.zext %threads32 : i32 to i64
    %e0 = llvm.shl %largest, %largest_bit : i64
    %e1 = llvm.shl %misaligned, %misaligned_bit : i64
    %e2 = llvm.shl %bucket, %rows_shift : i64
    %e3 = llvm.shl %threads, %threads_shift : i64
    %o0 = llvm.or %dt, %e0 : i64
    %o1 = llvm.or %e1, %e2 : i64
    %o2 = llvm.or %o0, %o1 : i64
    %code = llvm.or %o2, %e3 : i64
    {put("%address", "%call", 0)}
    {put("%rows", "%call", 1)}
    {put("%width", "%call", 2)}
    {put("%stride", "%call", 3)}
    {put("%code", "%call", 4)}
    {put("%nd", "%call", 5)}
    {put("%sz", "%call", 6, "!llvm.ptr")}
    {put("%dt", "%call", 7)}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def _launch() -> str:
    """launch(slot, call, values, indices, k): runs the slot's kernel on dense results; 0 if memory ran out."""
    pointers = ", ".join(["!llvm.ptr"] * 3)
    plain = f"({pointers}, i32, i32, i32, i64, i64, i64, !llvm.ptr, i32) -> ()"
    split = f"({pointers}, i32, i32, i32, i64, i64, i64, i32, !llvm.ptr, !llvm.ptr, i32) -> ()"
    arguments = "%x, %values, %indices, %rows32, %width32, %k32, %stride, %k, %k"
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
  llvm.func internal @launch(%slot: !llvm.ptr, %call: !llvm.ptr, %values: !llvm.ptr, %indices: !llvm.ptr, %k: i64) -> i1 {{
    {constants(zero=0)}
    %null = llvm.mlir.zero : !llvm.ptr
    %false = llvm.mlir.constant(false) : i1
    %true = llvm.mlir.constant(true) : i1
    %nothing = llvm.mlir.constant(0 : i32) : i32
    {word("%x", "%call", 0, "!llvm.ptr")}
    {word("%rows", "%call", 1)}
    {word("%width", "%call", 2)}
    {word("%stride", "%call", 3)}
    {word("%kernel", "%slot", TopkWords.KERNEL.value, "!llvm.ptr")}
    {word("%most", "%slot", TopkWords.THREADS.value)}
    {word("%parts", "%slot", TopkWords.PARTS.value)}
    {word("%row_workspace", "%slot", TopkWords.WORKSPACE.value)}
    {word("%private", "%slot", TopkWords.PRIVATE.value)}
    %rows32 = llvm.trunc %rows : i64 to i32
    %width32 = llvm.trunc %width : i64 to i32
    %k32 = llvm.trunc %k : i64 to i32
    %parts32 = llvm.trunc %parts : i64 to i32
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
    llvm.call %kernel({arguments}, %own, %threads) : !llvm.ptr, {plain}
    llvm.br ^give_back(%true : i1)
  ^split:
    {call("%ignored", "memset", "%space: !llvm.ptr, %nothing: i32, %shared_bytes: i64", "!llvm.ptr")}
    llvm.call %kernel({arguments}, %parts32, %space, %own, %threads) : !llvm.ptr, {split}
    llvm.br ^give_back(%true : i1)
  ^give_back(%done: i1):
    {call("", "free", "%own: !llvm.ptr", "")}
    {call("", "free", "%space: !llvm.ptr", "")}
    llvm.return %done : i1
  }}"""


def _contiguous() -> str:
    """dense(handle, call, k, scalar type, element bytes, at): 1 if the tensor is a dense CPU result of the call, apart
    from x in memory; at = {first byte, byte after the last}."""
    return f"""
  llvm.func internal @dense(%h: !llvm.ptr, %call: !llvm.ptr, %k: i64, %type: i64, %bytes: i64, %at: !llvm.ptr) -> i1 {{
    {room("nd_", "dt_", "sz_", "st_", "dev_")}
    {constants(zero=0, one=1, cpu=door.CPU, f32=door.F32, two=2)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    llvm.store %zero, %dev_ : i64, !llvm.ptr
    {word("%x", "%call", 0)}
    {word("%rows", "%call", 1)}
    {word("%width", "%call", 2)}
    {word("%stride", "%call", 3)}
    {word("%rank", "%call", 5)}
    {word("%wanted", "%call", 6, "!llvm.ptr")}
    {word("%xtype", "%call", 7)}
    {call("%r0", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%r1", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    {call("%r2", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    {call("%r3", "aoti_torch_get_strides", "%h: !llvm.ptr, %st_: !llvm.ptr")}
    {call("%r4", "aoti_torch_get_device_type", "%h: !llvm.ptr, %dev_: !llvm.ptr")}
    %r01 = llvm.or %r0, %r1 : i32
    %r23 = llvm.or %r2, %r3 : i32
    %r03 = llvm.or %r01, %r23 : i32
    %failed = llvm.or %r03, %r4 : i32
    %none = llvm.mlir.constant(0 : i32) : i32
    %read = llvm.icmp "eq" %failed, %none : i32
    llvm.cond_br %read, ^compare, ^no
  ^compare:
    %nd = llvm.load %nd_ : !llvm.ptr -> i64
    %dt = llvm.load %dt_ : !llvm.ptr -> i64
    %dev = llvm.load %dev_ : !llvm.ptr -> i64
    %sz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %st = llvm.load %st_ : !llvm.ptr -> !llvm.ptr
    %q0 = llvm.icmp "eq" %nd, %rank : i64
    %q1 = llvm.icmp "eq" %dt, %type : i64
    %q2 = llvm.icmp "eq" %dev, %cpu : i64
    %q3 = llvm.and %q0, %q1 : i1
    %q = llvm.and %q3, %q2 : i1
    llvm.cond_br %q, ^axis(%nd, %one : i64, i64), ^no
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^apart
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    {word("%outer", "%wanted", "%i")}
    %inner = llvm.icmp "eq" %above, %rank : i64
    %w = llvm.select %inner, %k, %outer : i1, i64
    %same = llvm.icmp "eq" %s, %w : i64
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %lies = llvm.or %single, %follows : i1
    %good = llvm.and %same, %lies : i1
    %next2 = llvm.mul %next, %s : i64
    llvm.cond_br %good, ^axis(%i, %next2 : i64, i64), ^no
  ^apart:
    {call("%r5", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at: !llvm.ptr")}
    %first = llvm.load %at : !llvm.ptr -> i64
    %elements = llvm.mul %rows, %k : i64
    %size = llvm.mul %elements, %bytes : i64
    %end = llvm.add %first, %size : i64
    {put("%end", "%at", 1)}
    %is32 = llvm.icmp "eq" %xtype, %f32 : i64
    %shift = llvm.select %is32, %two, %one : i1, i64
    %before = llvm.sub %rows, %one : i64
    %skipped = llvm.mul %before, %stride : i64
    %span = llvm.add %skipped, %width : i64
    %span_bytes = llvm.shl %span, %shift : i64
    %x_end = llvm.add %x, %span_bytes : i64
    %left = llvm.icmp "ule" %end, %x : i64
    %right = llvm.icmp "uge" %first, %x_end : i64
    %free = llvm.or %left, %right : i1
    llvm.return %free : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
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


def _topk() -> str:
    known = sum(1 << n for n in door.KNOWN_TO_ATEN)
    return f"""
  llvm.func @topk(%stack: !llvm.ptr, %arguments: i64, %results: i64) attributes {{personality = @__gxx_personality_v0}} {{
    {_arguments()}
    %eight = llvm.mlir.constant(8 : i64) : i64
    %rank_most = llvm.mlir.constant({door.DIMENSIONS_MOST} : i64) : i64
    %call = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    %osz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %ost = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
    {room("v_", "i_", "vp_", "ip_", "said", "nd_", "dt_", "sz_")}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %cpu = llvm.mlir.constant({door.CPU} : i32) : i32
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
    llvm.cond_br %served, ^results, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
  ^results:
    {word("%nd", "%call", 5)}
    {word("%sz", "%call", 6, "!llvm.ptr")}
    {word("%dt", "%call", 7)}
    llvm.br ^axis(%nd, %one : i64, i64)
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^empty
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%outer", "%sz", "%i")}
    %inner = llvm.icmp "eq" %above, %nd : i64
    %s = llvm.select %inner, %k, %outer : i1, i64
    {put("%s", "%osz", "%i")}
    {put("%next", "%ost", "%i")}
    %next2 = llvm.mul %next, %s : i64
    llvm.br ^axis(%i, %next2 : i64, i64)
  ^empty:
    %dt32 = llvm.trunc %dt : i64 to i32
    {call("%e0", "aoti_torch_empty_strided", "%nd: i64, %osz: !llvm.ptr, %ost: !llvm.ptr, %dt32: i32, %cpu: i32, "
           "%cpu: i32, %v_: !llvm.ptr")}
    %got0 = llvm.icmp "eq" %e0, %fine : i32
    llvm.cond_br %got0, ^empty2, ^aten
  ^empty2:
    %v = llvm.load %v_ : !llvm.ptr -> !llvm.ptr
    {call("%e1", "aoti_torch_empty_strided", "%nd: i64, %osz: !llvm.ptr, %ost: !llvm.ptr, %i64_type: i32, %cpu: i32, "
           "%cpu: i32, %i_: !llvm.ptr")}
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
    {constants(minus=-1, known=known, sixteen=16)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    {call("%e6", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%e7", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    {call("%e8", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    %and = llvm.load %nd_ : !llvm.ptr -> i64
    %adt = llvm.load %dt_ : !llvm.ptr -> i64
    %asz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %axes = llvm.intr.smax(%and, %one) : (i64, i64) -> i64
    %lowest = llvm.sub %zero, %axes : i64
    %x0 = llvm.icmp "sge" %dim, %lowest : i64
    %x1 = llvm.icmp "slt" %dim, %axes : i64
    %x2 = llvm.icmp "ult" %adt, %sixteen : i64
    %type_bit = llvm.shl %one, %adt : i64
    %type_known = llvm.and %type_bit, %known : i64
    %x3 = llvm.icmp "ne" %type_known, %zero : i64
    %x4 = llvm.and %x0, %x1 : i1
    %x5 = llvm.and %x2, %x3 : i1
    %x6 = llvm.and %x4, %x5 : i1
    llvm.cond_br %x6, ^k_of, ^throw
  ^k_of:
    %scalar = llvm.icmp "eq" %and, %zero : i64
    llvm.cond_br %scalar, ^k(%one : i64), ^k_size
  ^k_size:
    %back = llvm.icmp "slt" %dim, %zero : i64
    %wrapped = llvm.add %dim, %and : i64
    %at = llvm.select %back, %wrapped, %dim : i1, i64
    {word("%along", "%asz", "%at")}
    llvm.br ^k(%along : i64)
  ^k(%size_along: i64):
    %y0 = llvm.icmp "sge" %k, %zero : i64
    %y1 = llvm.icmp "sle" %k, %size_along : i64
    %y = llvm.and %y0, %y1 : i1
    llvm.cond_br %y, ^original, ^throw
  ^original:
    %largest32 = llvm.trunc %largest : i64 to i32
    %sorted32 = llvm.trunc %sorted : i64 to i32
    {call("%e9", "aoti_torch_cpu_topk", "%h: !llvm.ptr, %k: i64, %dim: i64, %largest32: i32, %sorted32: i32, "
           "%v_: !llvm.ptr, %i_: !llvm.ptr")}
    %went = llvm.icmp "eq" %e9, %fine : i32
    %v2 = llvm.load %v_ : !llvm.ptr -> !llvm.ptr
    %n2 = llvm.load %i_ : !llvm.ptr -> !llvm.ptr
    llvm.cond_br %went, ^leave(%v2, %n2 : !llvm.ptr, !llvm.ptr), ^throw
  ^throw:
    {invoke(door.TOPK, "%both: !llvm.ptr, %h: !llvm.ptr, %k: i64, %dim: i64, %largest8: i8, %sorted8: i8",
             "^unexpected", "^unwind")}
  ^unexpected:
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


def _topk_values() -> str:
    return f"""
  llvm.func @topk_values(%stack: !llvm.ptr, %arguments: i64, %results: i64) attributes {{personality = @__gxx_personality_v0}} {{
    {_arguments()}
    {word("%v", "%stack", 5, "!llvm.ptr")}
    {word("%n", "%stack", 6, "!llvm.ptr")}
    %eight = llvm.mlir.constant(8 : i64) : i64
    %call = llvm.alloca %eight x i64 : (i64) -> !llvm.ptr
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
    %good0 = llvm.call @dense(%v, %call, %k, %type, %bytes, %v_at) : (!llvm.ptr, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %good0, ^indices, ^aten
  ^indices:
    %good1 = llvm.call @dense(%n, %call, %k, %integer, %eight, %n_at) : (!llvm.ptr, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> i1
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
    llvm.cond_br %served, ^run, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
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
