"""How the operands of a top-k lie: what the door (x86_topk_door.py) asks of tensors before it looks a call up."""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import call, constants, put, room, word

VECTOR = 16  # bytes: rows at multiples of it are read with the widest loads


WORDS = 13  # of what `rows` tells of a call


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
    %some = llvm.icmp "sgt" %s, %zero : i64
    %c = llvm.and %fits, %some : i1
    %stride2 = llvm.select %innermost, %t, %stride : i1, i64
    %next2 = llvm.mul %t, %s : i64
    %count2 = llvm.mul %count, %s : i64
    llvm.cond_br %c, ^axis(%i, %count2, %stride2, %next2 : i64, i64, i64, i64), ^no
  ^all:
    {put("%count", "%at", 0)}
    {put("%stride", "%at", 1)}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def rows(gpu: int | None = None) -> str:
    """gpu: a device type by its number; None: the CPU.

    rows(handle, k, dim, largest, call): 1 if kernels may be asked, and then call = {0 address, 1 rows, 2 width,
    3 stride from one row (of the outer axes) to the next, 4 code, 5 rank, 6 sizes, 7 scalar type, 8 the dimension,
    9 rows of the inner axes, 10 stride along the row, 11 stride of the inner axes, 12 elements that x spans}."""
    shape = _on(gpu, "%h", "^shape", "^no") if gpu is not None else "llvm.cond_br %typed, ^shape, ^no"
    who = ("aoti_torch_get_device_index", "%h: !llvm.ptr, ") if gpu is not None else ("torch_get_num_threads", "")
    return f"""
  llvm.func internal @rows(%h: !llvm.ptr, %k: i64, %dim: i64, %largest: i64, %call: !llvm.ptr) -> i1 {{
    {room("nd_", "dt_", "sz_", "st_", "at_")}
    {constants(zero=0, one=1, f16=door.F16, f32=door.F32, bf16=door.BF16, most=door.ELEMENTS_MOST)}
    {constants(rank_most=door.DIMENSIONS_MOST, low=VECTOR - 1, two=2, sixtyfour=64, largest_bit=door.LARGEST_BIT)}
    {constants(misaligned_bit=door.MISALIGNED_BIT, rows_shift=door.ROWS_SHIFT, threads_shift=door.THREADS_SHIFT)}
    {constants(any_bit=door.ANY_BIT)}
    %outer_ = llvm.alloca %two x i64 : (i64) -> !llvm.ptr
    %inner_ = llvm.alloca %two x i64 : (i64) -> !llvm.ptr
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    {call("%r1", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    %none = llvm.mlir.constant(0 : i32) : i32
    %asked = llvm.icmp "eq" %r1, %none : i32
    %dt = llvm.load %dt_ : !llvm.ptr -> i64
    %is16 = llvm.icmp "eq" %dt, %f16 : i64
    %is32 = llvm.icmp "eq" %dt, %f32 : i64
    %isb = llvm.icmp "eq" %dt, %bf16 : i64
    %either = llvm.or %is16, %is32 : i1
    %known = llvm.or %either, %isb : i1
    %typed = llvm.and %asked, %known : i1
    {shape}
  ^shape:
    {call("%r0", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%r2", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    {call("%r3", "aoti_torch_get_strides", "%h: !llvm.ptr, %st_: !llvm.ptr")}
    %r01 = llvm.or %r0, %r2 : i32
    %failed = llvm.or %r01, %r3 : i32
    %read = llvm.icmp "eq" %failed, %none : i32
    llvm.cond_br %read, ^dimension, ^no
  ^dimension:
    %nd = llvm.load %nd_ : !llvm.ptr -> i64
    %sz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %st = llvm.load %st_ : !llvm.ptr -> !llvm.ptr
    %back = llvm.icmp "slt" %dim, %zero : i64
    %wrapped = llvm.add %dim, %nd : i64
    %d = llvm.select %back, %wrapped, %dim : i1, i64
    %d0 = llvm.icmp "sge" %d, %zero : i64
    %d1 = llvm.icmp "slt" %d, %nd : i64
    %few = llvm.icmp "sle" %nd, %rank_most : i64
    %a0 = llvm.and %d0, %d1 : i1
    %a = llvm.and %a0, %few : i1
    llvm.cond_br %a, ^width, ^no
  ^width:
    {word("%width", "%sz", "%d")}
    {word("%along_", "%st", "%d")}
    %lone = llvm.icmp "eq" %width, %one : i64
    %along = llvm.select %lone, %one, %along_ : i1, i64
    %k1 = llvm.icmp "sge" %k, %one : i64
    %k2 = llvm.icmp "sle" %k, %width : i64
    %w1 = llvm.icmp "sle" %width, %most : i64
    %b0 = llvm.and %k1, %k2 : i1
    %b = llvm.and %b0, %w1 : i1
    llvm.cond_br %b, ^outer, ^no
  ^outer:
    %good0 = llvm.call @collapse(%sz, %st, %zero, %d, %outer_) : (!llvm.ptr, !llvm.ptr, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %good0, ^inner, ^no
  ^inner:
    %behind = llvm.add %d, %one : i64
    %good1 = llvm.call @collapse(%sz, %st, %behind, %nd, %inner_) : (!llvm.ptr, !llvm.ptr, i64, i64, !llvm.ptr) -> i1
    llvm.cond_br %good1, ^all, ^no
  ^all:
    {word("%outer_rows", "%outer_", 0)}
    {word("%outer_stride", "%outer_", 1)}
    {word("%inner_rows", "%inner_", 0)}
    {word("%inner_stride", "%inner_", 1)}
    %rows = llvm.mul %outer_rows, %inner_rows : i64
    %elements = llvm.mul %rows, %width : i64
    %not_many = llvm.icmp "ule" %elements, %most : i64
    llvm.cond_br %not_many, ^describe, ^no
  ^describe:
    {call("%r4", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at_: !llvm.ptr")}
    %address = llvm.load %at_ : !llvm.ptr -> i64
    %one_row = llvm.icmp "eq" %outer_rows, %one : i64
    %stride = llvm.select %one_row, %width, %outer_stride : i1, i64
    %unit = llvm.icmp "eq" %along, %one : i64
    %rowwise = llvm.icmp "eq" %inner_rows, %one : i64
    %last = llvm.and %unit, %rowwise : i1
    %anywhere = llvm.select %last, %zero, %one : i1, i64
    %shift = llvm.select %is32, %two, %one : i1, i64
    %row_bytes = llvm.shl %stride, %shift : i64
    %both = llvm.or %address, %row_bytes : i64
    %odd = llvm.and %both, %low : i64
    %isodd = llvm.icmp "ne" %odd, %zero : i64
    %odd_row = llvm.zext %isodd : i1 to i64
    %misaligned = llvm.or %odd_row, %anywhere : i64
    %before = llvm.sub %rows, %one : i64
    %zeros = "llvm.intr.ctlz"(%before) <{{is_zero_poison = false}}> : (i64) -> i64
    %bucket = llvm.sub %sixtyfour, %zeros : i64
    llvm.store %zero, %at_ : i64, !llvm.ptr
    {call("%r5", who[0], f"{who[1]}%at_: !llvm.ptr")}
    %threads32 = llvm.load %at_ : !llvm.ptr -> i32
    %threads = llvm.zext %threads32 : i32 to i64
    %e0 = llvm.shl %largest, %largest_bit : i64
    %e1 = llvm.shl %misaligned, %misaligned_bit : i64
    %e2 = llvm.shl %bucket, %rows_shift : i64
    %e3 = llvm.shl %threads, %threads_shift : i64
    %e4 = llvm.shl %anywhere, %any_bit : i64
    %o0 = llvm.or %dt, %e0 : i64
    %o1 = llvm.or %e1, %e2 : i64
    %o2 = llvm.or %e3, %e4 : i64
    %o3 = llvm.or %o0, %o1 : i64
    %code = llvm.or %o2, %o3 : i64
    %n0 = llvm.sub %outer_rows, %one : i64
    %n1 = llvm.sub %inner_rows, %one : i64
    %n2 = llvm.sub %width, %one : i64
    %s0 = llvm.mul %n0, %outer_stride : i64
    %s1 = llvm.mul %n1, %inner_stride : i64
    %s2 = llvm.mul %n2, %along : i64
    %s3 = llvm.add %s0, %s1 : i64
    %s4 = llvm.add %s2, %one : i64
    %span = llvm.add %s3, %s4 : i64
    {put("%address", "%call", 0)}
    {put("%rows", "%call", 1)}
    {put("%width", "%call", 2)}
    {put("%stride", "%call", 3)}
    {put("%code", "%call", 4)}
    {put("%nd", "%call", 5)}
    {put("%sz", "%call", 6, "!llvm.ptr")}
    {put("%dt", "%call", 7)}
    {put("%d", "%call", 8)}
    {put("%inner_rows", "%call", 9)}
    {put("%along", "%call", 10)}
    {put("%inner_stride", "%call", 11)}
    {put("%span", "%call", 12)}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def _on(device_type: int, handle: str, yes: str, no: str) -> str:
    """To `yes` where %typed holds and the tensor is of this device type."""
    return f"""llvm.cond_br %typed, ^place, {no}
  ^place:
    {constants(kind=device_type)}
    llvm.store %zero, %at_ : i64, !llvm.ptr
    {call("%r6", "aoti_torch_get_device_type", f"{handle}: !llvm.ptr, %at_: !llvm.ptr")}
    %kind_ = llvm.load %at_ : !llvm.ptr -> i64
    %here = llvm.icmp "eq" %kind_, %kind : i64
    llvm.cond_br %here, {yes}, {no}"""


def dense(gpu: int | None = None) -> str:
    """dense(handle, call, k, scalar type, element bytes, at): 1 if the tensor is a dense result of the call on x's
    device, apart from x in memory; at = {first byte, byte after the last}."""
    near = ""
    if gpu is not None:
        near = f"""
    llvm.store %zero, %nd_ : i64, !llvm.ptr
    {call("%r6", "aoti_torch_get_device_index", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {constants(threads_shift=door.THREADS_SHIFT)}
    {word("%code", "%call", 4)}
    %number = llvm.lshr %code, %threads_shift : i64
    %number_ = llvm.load %nd_ : !llvm.ptr -> i64
    %near = llvm.icmp "eq" %number, %number_ : i64
    llvm.cond_br %near, ^laid_out, ^no
  ^laid_out:"""
    return f"""
  llvm.func internal @dense(%h: !llvm.ptr, %call: !llvm.ptr, %k: i64, %type: i64, %bytes: i64, %at: !llvm.ptr) -> i1 {{
    {room("nd_", "dt_", "sz_", "st_", "dev_")}
    {constants(zero=0, one=1, device=door.CPU if gpu is None else gpu, f32=door.F32, two=2)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    llvm.store %zero, %dev_ : i64, !llvm.ptr
    {word("%x", "%call", 0)}
    {word("%rows", "%call", 1)}
    {word("%dim", "%call", 8)}
    {word("%rank", "%call", 5)}
    {word("%span", "%call", 12)}
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
    %q2 = llvm.icmp "eq" %dev, %device : i64
    %q3 = llvm.and %q0, %q1 : i1
    %q = llvm.and %q3, %q2 : i1
    llvm.cond_br %q, ^where, ^no
  ^where:{near}
    llvm.br ^axis(%nd, %one : i64, i64)
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^apart
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    {word("%outer", "%wanted", "%i")}
    %chosen = llvm.icmp "eq" %i, %dim : i64
    %w = llvm.select %chosen, %k, %outer : i1, i64
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
