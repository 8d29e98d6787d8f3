"""The door from PyTorch's dispatcher into RMSNorm kernels of a GPU: one function, for aten::_fused_rms_norm.

    void rms_norm(StableIValue *stack, uint64_t arguments, uint64_t results)

A call whose elements lie as kernels want them is looked up by width, rows (by powers of two) and what `rms_code_of`
packs; the slot says who serves it: a kernel, launched right here on torch's current stream, or ATen. What no slot knows is
asked of `resolve` (Python) once. Everything else, and what the driver refuses to launch, is ATen's own function.

Kernels that a slot may name are one code object without workspace, clusters or tensor maps, whose grid is as many
workgroups as the argument `parts` says: that is what `rms_norm` can launch.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from ..launch import torch_door as door
from ..launch.torch_door import RmsWords
from .x86_door import call, compile_door, constants, find, invoke, module, put, room, say, word

ENTRY = "rms_norm"
VECTOR = 16  # bytes: a larger alignment says nothing more
WORDS = 12  # of what `norm_rows` tells of a call


def build(device_type: int) -> CodeObject:
    """The door for tensors of a device type, by DeviceType's number (c10/core/DeviceType.h)."""
    functions = (find(), _rows(), _weight(), _launch(), _rms_norm(device_type))
    return compile_door("rms_norm", module("rms_norm", *functions), ENTRY)


def _rows() -> str:
    """norm_rows(x, shape, call): 1 if kernels may be asked, and then call = {0 address, 1 rows, 2 width, 3 row stride,
    4 rank, 5 sizes, 6 scalar type, 7 axes of a row, 8 device's number, 9 address or row's bytes where they matter}."""
    return f"""
  llvm.func internal @norm_rows(%h: !llvm.ptr, %list: !llvm.ptr, %call: !llvm.ptr) -> i1 {{
    {room("nd_", "dt_", "sz_", "st_", "at_", "dev_", "n_", "item_")}
    {constants(zero=0, one=1, two=2, f16=door.F16, f32=door.F32, bf16=door.BF16, rank_most=door.DIMENSIONS_MOST)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    llvm.store %zero, %dev_ : i64, !llvm.ptr
    {call("%r0", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%r1", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    {call("%r2", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    {call("%r3", "aoti_torch_get_strides", "%h: !llvm.ptr, %st_: !llvm.ptr")}
    {call("%r4", "aoti_torch_get_device_index", "%h: !llvm.ptr, %dev_: !llvm.ptr")}
    {call("%r5", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    %r01 = llvm.or %r0, %r1 : i32
    %r23 = llvm.or %r2, %r3 : i32
    %r45 = llvm.or %r4, %r5 : i32
    %r03 = llvm.or %r01, %r23 : i32
    %failed = llvm.or %r03, %r45 : i32
    %none = llvm.mlir.constant(0 : i32) : i32
    %read = llvm.icmp "eq" %failed, %none : i32
    llvm.cond_br %read, ^type, ^no
  ^type:
    %nd = llvm.load %nd_ : !llvm.ptr -> i64
    %dt = llvm.load %dt_ : !llvm.ptr -> i64
    %sz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %st = llvm.load %st_ : !llvm.ptr -> !llvm.ptr
    %dev = llvm.load %dev_ : !llvm.ptr -> i64
    %n = llvm.load %n_ : !llvm.ptr -> i64
    %is16 = llvm.icmp "eq" %dt, %f16 : i64
    %is32 = llvm.icmp "eq" %dt, %f32 : i64
    %isb = llvm.icmp "eq" %dt, %bf16 : i64
    %either = llvm.or %is16, %is32 : i1
    %typed = llvm.or %either, %isb : i1
    %some = llvm.icmp "sge" %n, %one : i64
    %within = llvm.icmp "sle" %n, %nd : i64
    %few = llvm.icmp "sle" %nd, %rank_most : i64
    %a0 = llvm.and %typed, %some : i1
    %a1 = llvm.and %within, %few : i1
    %a = llvm.and %a0, %a1 : i1
    %outer = llvm.sub %nd, %n : i64
    llvm.cond_br %a, ^inner(%nd, %one : i64, i64), ^no
  ^inner(%above: i64, %width: i64):
    %more = llvm.icmp "sgt" %above, %outer : i64
    llvm.cond_br %more, ^row_axis, ^axis(%outer, %one, %width, %zero : i64, i64, i64, i64)
  ^row_axis:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    %j = llvm.sub %i, %outer : i64
    {call("%r6", "torch_list_get_item", "%list: !llvm.ptr, %j: i64, %item_: !llvm.ptr")}
    %item = llvm.load %item_ : !llvm.ptr -> i64
    %named = llvm.icmp "eq" %item, %s : i64
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %width : i64
    %lies = llvm.or %single, %follows : i1
    %any = llvm.icmp "sge" %s, %one : i64
    %b0 = llvm.and %named, %lies : i1
    %b = llvm.and %b0, %any : i1
    %width2 = llvm.mul %width, %s : i64
    llvm.cond_br %b, ^inner(%i, %width2 : i64, i64), ^no
  ^axis(%above2: i64, %rows: i64, %stride: i64, %next: i64):
    %more2 = llvm.icmp "sgt" %above2, %zero : i64
    llvm.cond_br %more2, ^size, ^all
  ^size:
    %i2 = llvm.sub %above2, %one : i64
    {word("%s2", "%sz", "%i2")}
    {word("%t2", "%st", "%i2")}
    %single2 = llvm.icmp "eq" %s2, %one : i64
    llvm.cond_br %single2, ^axis(%i2, %rows, %stride, %next : i64, i64, i64, i64), ^several
  ^several:
    %first = llvm.icmp "eq" %rows, %one : i64
    %follows2 = llvm.icmp "eq" %t2, %next : i64
    %fits = llvm.or %first, %follows2 : i1
    %apart = llvm.icmp "sge" %t2, %width : i64
    %any2 = llvm.icmp "sgt" %s2, %zero : i64
    %c0 = llvm.and %fits, %apart : i1
    %c = llvm.and %c0, %any2 : i1
    %stride2 = llvm.select %first, %t2, %stride : i1, i64
    %next2 = llvm.mul %t2, %s2 : i64
    %rows2 = llvm.mul %rows, %s2 : i64
    llvm.cond_br %c, ^axis(%i2, %rows2, %stride2, %next2 : i64, i64, i64, i64), ^no
  ^all:
    {call("%r7", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at_: !llvm.ptr")}
    %address = llvm.load %at_ : !llvm.ptr -> i64
    %shift = llvm.select %is32, %two, %one : i1, i64
    %row_bytes = llvm.shl %stride, %shift : i64
    %alone = llvm.icmp "eq" %rows, %one : i64
    %matters = llvm.select %alone, %zero, %row_bytes : i1, i64
    %low = llvm.or %address, %matters : i64
    {put("%address", "%call", 0)}
    {put("%rows", "%call", 1)}
    {put("%width", "%call", 2)}
    {put("%stride", "%call", 3)}
    {put("%nd", "%call", 4)}
    {put("%sz", "%call", 5, "!llvm.ptr")}
    {put("%dt", "%call", 6)}
    {put("%n", "%call", 7)}
    {put("%dev", "%call", 8)}
    {put("%low", "%call", 9)}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def _weight() -> str:
    """norm_weight(weight, call, device type, at): its scalar type if it is a dense weight of the call's rows on x's
    device, else -1; at = its address."""
    return f"""
  llvm.func internal @norm_weight(%h: !llvm.ptr, %call: !llvm.ptr, %type: i64, %at_: !llvm.ptr) -> i64 {{
    {room("nd_", "dt_", "sz_", "st_", "dev_", "kind_")}
    {constants(zero=0, one=1, minus=-1, f16=door.F16, f32=door.F32, bf16=door.BF16)}
    llvm.store %zero, %dt_ : i64, !llvm.ptr
    llvm.store %zero, %dev_ : i64, !llvm.ptr
    llvm.store %zero, %kind_ : i64, !llvm.ptr
    {call("%r0", "aoti_torch_get_dim", "%h: !llvm.ptr, %nd_: !llvm.ptr")}
    {call("%r1", "aoti_torch_get_dtype", "%h: !llvm.ptr, %dt_: !llvm.ptr")}
    {call("%r2", "aoti_torch_get_sizes", "%h: !llvm.ptr, %sz_: !llvm.ptr")}
    {call("%r3", "aoti_torch_get_strides", "%h: !llvm.ptr, %st_: !llvm.ptr")}
    {call("%r4", "aoti_torch_get_device_index", "%h: !llvm.ptr, %dev_: !llvm.ptr")}
    {call("%r5", "aoti_torch_get_device_type", "%h: !llvm.ptr, %kind_: !llvm.ptr")}
    %r01 = llvm.or %r0, %r1 : i32
    %r23 = llvm.or %r2, %r3 : i32
    %r45 = llvm.or %r4, %r5 : i32
    %r03 = llvm.or %r01, %r23 : i32
    %failed = llvm.or %r03, %r45 : i32
    %none = llvm.mlir.constant(0 : i32) : i32
    %read = llvm.icmp "eq" %failed, %none : i32
    llvm.cond_br %read, ^compare, ^no
  ^compare:
    %nd = llvm.load %nd_ : !llvm.ptr -> i64
    %dt = llvm.load %dt_ : !llvm.ptr -> i64
    %sz = llvm.load %sz_ : !llvm.ptr -> !llvm.ptr
    %st = llvm.load %st_ : !llvm.ptr -> !llvm.ptr
    %dev = llvm.load %dev_ : !llvm.ptr -> i64
    %kind = llvm.load %kind_ : !llvm.ptr -> i64
    {word("%rank", "%call", 4)}
    {word("%xsz", "%call", 5, "!llvm.ptr")}
    {word("%axes", "%call", 7)}
    {word("%xdev", "%call", 8)}
    %q0 = llvm.icmp "eq" %nd, %axes : i64
    %q1 = llvm.icmp "eq" %dev, %xdev : i64
    %q2 = llvm.icmp "eq" %kind, %type : i64
    %t0 = llvm.icmp "eq" %dt, %f16 : i64
    %t1 = llvm.icmp "eq" %dt, %f32 : i64
    %t2 = llvm.icmp "eq" %dt, %bf16 : i64
    %t3 = llvm.or %t0, %t1 : i1
    %t4 = llvm.or %t3, %t2 : i1
    %q3 = llvm.and %q0, %q1 : i1
    %q4 = llvm.and %q2, %t4 : i1
    %q = llvm.and %q3, %q4 : i1
    %outer = llvm.sub %rank, %axes : i64
    llvm.cond_br %q, ^axis(%nd, %one : i64, i64), ^no
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^yes
  ^size:
    %i = llvm.sub %above, %one : i64
    %xi = llvm.add %i, %outer : i64
    {word("%s", "%sz", "%i")}
    {word("%t", "%st", "%i")}
    {word("%xs", "%xsz", "%xi")}
    %same = llvm.icmp "eq" %s, %xs : i64
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %lies = llvm.or %single, %follows : i1
    %good = llvm.and %same, %lies : i1
    %next2 = llvm.mul %next, %s : i64
    llvm.cond_br %good, ^axis(%i, %next2 : i64, i64), ^no
  ^yes:
    {call("%r6", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at_: !llvm.ptr")}
    llvm.return %dt : i64
  ^no:
    llvm.return %minus : i64
  }}"""


def _launch() -> str:
    """norm_launch(slot, call, weight's address or 0, y, rstd, eps's bits): 1 if the driver took the launch."""
    return f"""
  llvm.func internal @norm_launch(%slot: !llvm.ptr, %call: !llvm.ptr, %w: i64, %y: i64, %rstd: i64, %eps: i64) -> i1 {{
    {room("stream_")}
    {constants(zero=0, one=1, values_most=8)}
    %none = llvm.mlir.constant(0 : i32) : i32
    %single = llvm.mlir.constant(1 : i32) : i32
    %null = llvm.mlir.zero : !llvm.ptr
    %values = llvm.alloca %values_most x i64 : (i64) -> !llvm.ptr
    %places = llvm.alloca %values_most x i64 : (i64) -> !llvm.ptr
    {word("%x", "%call", 0)}
    {word("%rows", "%call", 1)}
    {word("%stride", "%call", 3)}
    {word("%device", "%call", 8)}
    {word("%function", "%slot", RmsWords.FUNCTION.value, "!llvm.ptr")}
    {word("%threads", "%slot", RmsWords.WORKGROUP.value)}
    {word("%tile", "%slot", RmsWords.TILE.value)}
    {word("%most", "%slot", RmsWords.PARTS_MOST.value)}
    %up = llvm.add %rows, %tile : i64
    %up1 = llvm.sub %up, %one : i64
    %tiles = llvm.udiv %up1, %tile : i64
    %parts = llvm.intr.umin(%tiles, %most) : (i64, i64) -> i64
    {put("%x", "%values", 0)}
    {put("%w", "%values", 1)}
    {put("%y", "%values", 2)}
    {put("%rstd", "%values", 3)}
    {put("%eps", "%values", 4)}
    {put("%rows", "%values", 5)}
    {put("%stride", "%values", 6)}
    {put("%parts", "%values", 7)}
    %weightless = llvm.icmp "eq" %w, %zero : i64
    %skip = llvm.zext %weightless : i1 to i64
    {put("%values", "%places", 0, "!llvm.ptr")}
    llvm.br ^place(%one : i64)
  ^place(%i: i64):
    %more = llvm.icmp "ult" %i, %values_most : i64
    llvm.cond_br %more, ^put, ^go
  ^put:
    %j0 = llvm.add %i, %skip : i64
    %last = llvm.sub %values_most, %one : i64
    %j = llvm.intr.umin(%j0, %last) : (i64, i64) -> i64
    %value = llvm.getelementptr %values[%j] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    {put("%value", "%places", "%i", "!llvm.ptr")}
    %i2 = llvm.add %i, %one : i64
    llvm.br ^place(%i2 : i64)
  ^go:
    %device32 = llvm.trunc %device : i64 to i32
    {call("%r0", "aoti_torch_get_current_cuda_stream", "%device32: i32, %stream_: !llvm.ptr")}
    %stream = llvm.load %stream_ : !llvm.ptr -> !llvm.ptr
    %grid = llvm.trunc %parts : i64 to i32
    %threads32 = llvm.trunc %threads : i64 to i32
    {call("%r1", "launch", "%function: !llvm.ptr, %grid: i32, %single: i32, %single: i32, %threads32: i32, %single: i32, "
          "%single: i32, %none: i32, %stream: !llvm.ptr, %places: !llvm.ptr, %null: !llvm.ptr")}
    %status = llvm.or %r0, %r1 : i32
    %took = llvm.icmp "eq" %status, %none : i32
    llvm.return %took : i1
  }}"""  # fmt: skip


def _release(at: str, name: str) -> str:
    """Gives back what the stack owned; ends in block ^AT_end. name: of the values, unique."""
    return f"""
    {call(f"%{name}0", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    {call(f"%{name}1", "torch_delete_list", "%list: !llvm.ptr")}
    {call("", "free", "%eps_cell: !llvm.ptr", "")}
    llvm.cond_br %weighted, ^{at}_weight, ^{at}_end
  ^{at}_weight:
    {call(f"%{name}2", "aoti_torch_delete_tensor_object", "%w: !llvm.ptr")}
    {call("", "free", "%w_cell: !llvm.ptr", "")}
    llvm.br ^{at}_end
  ^{at}_end:"""


def _rms_norm(device_type: int) -> str:
    return f"""
  llvm.func @rms_norm(%stack: !llvm.ptr, %arguments: i64, %results: i64) attributes {{personality = @__gxx_personality_v0}} {{
    {word("%h", "%stack", 0, "!llvm.ptr")}
    {word("%list", "%stack", 1, "!llvm.ptr")}
    {word("%w_cell", "%stack", 2, "!llvm.ptr")}
    {word("%eps_cell", "%stack", 3, "!llvm.ptr")}
    {constants(zero=0, one=1, minus=-1, cells=WORDS, type=device_type, rank_most=door.DIMENSIONS_MOST, low=VECTOR)}
    {constants(sixtyfour=64, weight_shift=door.WEIGHT_SHIFT, align_shift=door.ALIGN_SHIFT, device_shift=door.DEVICE_SHIFT)}
    {constants(default_eps=door.EPS_BITS, no_weight=door.NO_WEIGHT, eight=8, two_words=2)}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %ysz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %yst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rsz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    %optional = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    {room("y_", "r_", "yp_", "rp_", "wp_", "said", "n_", "here_", "guard_")}
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    llvm.store %zero, %wp_ : i64, !llvm.ptr
    llvm.store %zero, %here_ : i64, !llvm.ptr
    %weighted = llvm.icmp "ne" %w_cell, %null : !llvm.ptr
    %eps_given = llvm.icmp "ne" %eps_cell, %null : !llvm.ptr
    llvm.cond_br %weighted, ^unpack_w, ^no_w
  ^unpack_w:
    %w1 = llvm.load %w_cell : !llvm.ptr -> !llvm.ptr
    llvm.br ^unpacked_w(%w1 : !llvm.ptr)
  ^no_w:
    llvm.br ^unpacked_w(%null : !llvm.ptr)
  ^unpacked_w(%w: !llvm.ptr):
    llvm.cond_br %eps_given, ^unpack_eps, ^no_eps
  ^unpack_eps:
    %eps1 = llvm.load %eps_cell : !llvm.ptr -> f64
    %eps_f32 = llvm.fptrunc %eps1 : f64 to f32
    %eps_bits32 = llvm.bitcast %eps_f32 : f32 to i32
    %eps_bits1 = llvm.zext %eps_bits32 : i32 to i64
    llvm.br ^start(%eps1, %eps_bits1 : f64, i64)
  ^no_eps:
    %nothing = llvm.mlir.constant(0.0 : f64) : f64
    llvm.br ^start(%nothing, %default_eps : f64, i64)
  ^start(%eps: f64, %eps_bits: i64):
    %asked = llvm.call @norm_rows(%h, %list, %call) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %asked, ^weight, ^aten
  ^weight:
    llvm.cond_br %weighted, ^check_weight, ^find(%no_weight : i64)
  ^check_weight:
    %wt = llvm.call @norm_weight(%w, %call, %type, %wp_) : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i64
    %wrong = llvm.icmp "eq" %wt, %minus : i64
    llvm.cond_br %wrong, ^aten, ^find(%wt : i64)
  ^find(%wtype: i64):
    %wp = llvm.load %wp_ : !llvm.ptr -> i64
    {word("%rows", "%call", 1)}
    {word("%width", "%call", 2)}
    {word("%nd", "%call", 4)}
    {word("%sz", "%call", 5, "!llvm.ptr")}
    {word("%dt", "%call", 6)}
    {word("%axes", "%call", 7)}
    {word("%device", "%call", 8)}
    {word("%x_low", "%call", 9)}
    %l0 = llvm.or %x_low, %wp : i64
    %l1 = llvm.or %l0, %low : i64
    %l2 = llvm.sub %zero, %l1 : i64
    %align = llvm.and %l1, %l2 : i64
    %before = llvm.sub %rows, %one : i64
    %zeros = "llvm.intr.ctlz"(%before) <{{is_zero_poison = false}}> : (i64) -> i64
    %bucket = llvm.sub %sixtyfour, %zeros : i64
    %e0 = llvm.shl %wtype, %weight_shift : i64
    %e1 = llvm.shl %align, %align_shift : i64
    %e2 = llvm.shl %device, %device_shift : i64
    %o0 = llvm.or %dt, %e0 : i64
    %o1 = llvm.or %e1, %e2 : i64
    %code = llvm.or %o0, %o1 : i64
    %slot = llvm.call @find(%width, %bucket, %code, %rows, %said) : (i64, i64, i64, i64, !llvm.ptr) -> !llvm.ptr
    %served = llvm.icmp "ne" %slot, %null : !llvm.ptr
    llvm.cond_br %served, ^here, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
  ^here:
    {call("%h0", door.CURRENT, "%here_: !llvm.ptr")}
    %here = llvm.load %here_ : !llvm.ptr -> i64
    %at_home = llvm.icmp "eq" %here, %device : i64
    llvm.cond_br %at_home, ^results, ^aten
  ^results:
    %outer = llvm.sub %nd, %axes : i64
    llvm.br ^axis(%nd, %one, %one : i64, i64, i64)
  ^axis(%above: i64, %ynext: i64, %rnext: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^empty
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%sz", "%i")}
    %in_row = llvm.icmp "sge" %i, %outer : i64
    %rs = llvm.select %in_row, %one, %s : i1, i64
    {put("%s", "%ysz", "%i")}
    {put("%ynext", "%yst", "%i")}
    {put("%rs", "%rsz", "%i")}
    {put("%rnext", "%rst", "%i")}
    %ynext2 = llvm.mul %ynext, %s : i64
    %rnext2 = llvm.mul %rnext, %rs : i64
    llvm.br ^axis(%i, %ynext2, %rnext2 : i64, i64, i64)
  ^empty:
    %dt32 = llvm.trunc %dt : i64 to i32
    %f32_type = llvm.mlir.constant({door.F32} : i32) : i32
    %type32 = llvm.trunc %type : i64 to i32
    %device32 = llvm.trunc %device : i64 to i32
    {call("%a0", "aoti_torch_empty_strided", "%nd: i64, %ysz: !llvm.ptr, %yst: !llvm.ptr, %dt32: i32, %type32: i32, "
          "%device32: i32, %y_: !llvm.ptr")}
    %got0 = llvm.icmp "eq" %a0, %fine : i32
    llvm.cond_br %got0, ^empty2, ^aten
  ^empty2:
    %y = llvm.load %y_ : !llvm.ptr -> !llvm.ptr
    {call("%a1", "aoti_torch_empty_strided", "%nd: i64, %rsz: !llvm.ptr, %rst: !llvm.ptr, %f32_type: i32, %type32: i32, "
          "%device32: i32, %r_: !llvm.ptr")}
    %got1 = llvm.icmp "eq" %a1, %fine : i32
    llvm.cond_br %got1, ^run, ^drop_y
  ^run:
    %r = llvm.load %r_ : !llvm.ptr -> !llvm.ptr
    {call("%a2", "aoti_torch_get_data_ptr", "%y: !llvm.ptr, %yp_: !llvm.ptr")}
    {call("%a3", "aoti_torch_get_data_ptr", "%r: !llvm.ptr, %rp_: !llvm.ptr")}
    %yp = llvm.load %yp_ : !llvm.ptr -> i64
    %rp = llvm.load %rp_ : !llvm.ptr -> i64
    %ran = llvm.call @norm_launch(%slot, %call, %wp, %yp, %rp, %eps_bits) : (!llvm.ptr, !llvm.ptr, i64, i64, i64, i64) -> i1
    llvm.cond_br %ran, ^leave(%y, %r : !llvm.ptr, !llvm.ptr), ^drop
  ^drop:
    {call("%a4", "aoti_torch_delete_tensor_object", "%r: !llvm.ptr")}
    llvm.br ^drop_y
  ^drop_y:
    {call("%a5", "aoti_torch_delete_tensor_object", "%y: !llvm.ptr")}
    llvm.br ^aten
  ^aten:
    {call("%a6", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    %n = llvm.load %n_ : !llvm.ptr -> i64
    %room = llvm.intr.umax(%n, %one) : (i64, i64) -> i64
    %shape = llvm.alloca %room x i64 : (i64) -> !llvm.ptr
    llvm.br ^copy(%zero : i64)
  ^copy(%c: i64):
    %left = llvm.icmp "ult" %c, %n : i64
    llvm.cond_br %left, ^item, ^weight_of
  ^item:
    %place = llvm.getelementptr %shape[%c] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    {call("%a7", "torch_list_get_item", "%list: !llvm.ptr, %c: i64, %place: !llvm.ptr")}
    %c2 = llvm.add %c, %one : i64
    llvm.br ^copy(%c2 : i64)
  ^weight_of:
    %has_w = llvm.zext %weighted : i1 to i64
    {put("%has_w", "%optional", 1)}
    llvm.cond_br %weighted, ^with_w, ^original
  ^with_w:
    {word("%impl", "%w", 0)}
    {put("%impl", "%optional", 0)}
    llvm.br ^original
  ^original:
    %has_eps = llvm.zext %eps_given : i1 to i64
    {invoke("rms_norm", "%both: !llvm.ptr, %h: !llvm.ptr, %shape: !llvm.ptr, %n: i64, %optional: !llvm.ptr, %eps: f64, "
            "%has_eps: i64", "^boxes", "^unwind")}
  ^boxes:
    {call("%box0", "malloc", "%eight: i64", "!llvm.ptr")}
    {call("%box1", "malloc", "%eight: i64", "!llvm.ptr")}
    {word("%second", "%both", 0)}
    {word("%first", "%both", 1)}
    {put("%first", "%box0", 0)}
    {put("%second", "%box1", 0)}
    llvm.br ^leave(%box0, %box1 : !llvm.ptr, !llvm.ptr)
  ^leave(%out0: !llvm.ptr, %out1: !llvm.ptr):
    {_release("leave", "d")}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr")}
    llvm.return
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {_release("unwind", "u")}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>
  }}"""  # fmt: skip
