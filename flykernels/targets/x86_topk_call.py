"""How the operands of a top-k lie: what the door (x86_topk_door.py) asks of tensors before it looks a call up."""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import call, constants, put, room, word

VECTOR = 16  # bytes: rows at multiples of it are read with the widest loads


def rows() -> str:
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


def dense() -> str:
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
