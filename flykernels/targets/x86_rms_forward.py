"""The entries of the doors for RMSNorm (x86_rms_door.py) that are forward: MLIR text.

    fused        aten::_fused_rms_norm below autograd, on a GPU or the CPU: (y, rstd)
    composed     aten::rms_norm on the CPU below autograd: y
    autograd     aten::rms_norm on the CPU's autograd key: y. It runs nothing: what is ours goes on to
                 aten::_fused_rms_norm and so to ATen's derivative of it, all else to what ATen composes
"""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import PERSONALITY, call, constants, fold, invoke, put, room, say, word
from .x86_rms_tensors import CALL_WORDS, Word

VECTOR = 16  # bytes: a larger alignment says nothing more
LEVELS = ("fused", "composed", "autograd")


def forward(entry: str, level: str, device_type: int, gpu: bool) -> str:
    """One entry. device_type: DeviceType's number of its tensors."""
    two = level == "fused"
    original = "rms_norm" if gpu else door.COMPOSED
    return f"""
  llvm.func @{entry}(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {word("%h", "%stack", 0, "!llvm.ptr")}
    {word("%list", "%stack", 1, "!llvm.ptr")}
    {word("%w_cell", "%stack", 2, "!llvm.ptr")}
    {word("%eps_cell", "%stack", 3, "!llvm.ptr")}
    {constants(zero=0, one=1, minus=-1, cells=CALL_WORDS, type=device_type, rank_most=door.DIMENSIONS_MOST)}
    {constants(default_eps=door.EPS_BITS, no_weight=door.NO_WEIGHT, eight=8, two_words=2)}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %values = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %ysz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %yst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rsz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    %optional = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    {room("y_", "r_", "yp_", "rp_", "wp_", "said", "n_", "threads_")}
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    llvm.store %zero, %wp_ : i64, !llvm.ptr
    llvm.store %zero, %threads_ : i64, !llvm.ptr
    %weighted = llvm.icmp "ne" %w_cell, %null : !llvm.ptr
    %eps_given = llvm.icmp "ne" %eps_cell, %null : !llvm.ptr
    llvm.cond_br %weighted, ^unpack_w, ^unpacked_w(%null : !llvm.ptr)
  ^unpack_w:
    %w1 = llvm.load %w_cell : !llvm.ptr -> !llvm.ptr
    llvm.br ^unpacked_w(%w1 : !llvm.ptr)
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
    {_nobody_looks_on() if level == "autograd" else ""}
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
    {word("%rows", "%call", Word.ROWS.value)}
    {word("%width", "%call", Word.WIDTH.value)}
    {word("%stride", "%call", Word.STRIDE.value)}
    {word("%nd", "%call", Word.RANK.value)}
    {word("%sz", "%call", Word.SIZES.value, "!llvm.ptr")}
    {word("%dt", "%call", Word.TYPE.value)}
    {word("%axes", "%call", Word.AXES.value)}
    {word("%device", "%call", Word.DEVICE.value)}
    {alignment("%align", "%wp") if gpu else _wanted(level)}
    {look_up("%align", "%device" if gpu else "%threads")}
    llvm.cond_br %served, {"^dispatch" if level == "autograd" else "^results"}, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, ^aten
  ^fail:
    {say("%message", "^aten", "^unwind")}
    {_dispatch() if level == "autograd" else _run(two, gpu)}
  ^aten:
    {shape_and_weight("aten")}
    %has_epsaten = llvm.zext %eps_given : i1 to i64
    {"llvm.br ^original" if two else _checked()}
  ^original:
    {invoke(original, atens("aten"), "^boxes", "^unwind")}
  ^boxes:
    {_boxes("boxes", two)}
  ^leave({"%out0: !llvm.ptr, %out1: !llvm.ptr" if two else "%out0: !llvm.ptr"}):
    {release("leave")}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr") if two else ""}
    llvm.return
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {release("unwind")}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>
  }}"""  # fmt: skip


def atens(at: str) -> str:
    """Arguments of ATen's functions, made by `shape_and_weight(at)`; what they return goes to %both."""
    return (
        f"%both: !llvm.ptr, %h: !llvm.ptr, %shape{at}: !llvm.ptr, %n{at}: i64, %optional: !llvm.ptr, %eps: f64, "
        f"%has_eps{at}: i64"
    )


def _nobody_looks_on() -> str:
    """On to ^unseen, or to ^aten where a mode, a transform or a tensor's class wants to see what ATen composes."""
    return f"""
    {call("%modes", door.MODES, "", "i64")}
    {call("%layers", door.LAYERS, "", "!llvm.ptr")}
    {word("%layer0", "%layers", 0)}
    {word("%layer1", "%layers", 1)}
    {call("%looks8", door.LOOKS_ON, "%h: !llvm.ptr", "i8")}
    %no8 = llvm.mlir.constant(0 : i8) : i8
    %s0 = llvm.icmp "eq" %modes, %zero : i64
    %s1 = llvm.icmp "eq" %layer0, %layer1 : i64
    %s2 = llvm.icmp "eq" %looks8, %no8 : i8
    {fold("and", "%alone", "%s0", "%s1", "%s2")}
    llvm.cond_br %alone, ^weight_looks, ^aten
  ^weight_looks:
    llvm.cond_br %weighted, ^ask_weight, ^unseen
  ^ask_weight:
    {call("%looks8_", door.LOOKS_ON, "%w: !llvm.ptr", "i8")}
    %s3 = llvm.icmp "eq" %looks8_, %no8 : i8
    llvm.cond_br %s3, ^unseen, ^aten
  ^unseen:"""


def alignment(result: str, *addresses: str) -> str:
    """result = the largest power of two, up to VECTOR, that divides x's rows and these addresses."""
    text = word("%x_low", "%call", Word.LOW.value) + constants(low=VECTOR)
    return text + f"""
    {fold("or", "%l1", "%x_low", "%low", *addresses, kind="i64")}
    %l2 = llvm.sub %zero, %l1 : i64
    {result} = llvm.and %l1, %l2 : i64"""


def threads() -> str:
    """%threads: as many as torch uses."""
    return f"""
    {call("%t0", "torch_get_num_threads", "%threads_: !llvm.ptr")}
    %threads32 = llvm.load %threads_ : !llvm.ptr -> i32
    %threads = llvm.zext %threads32 : i32 to i64"""


def _wanted(level: str) -> str:
    """%align = 1 if a gradient is wanted; %threads."""
    if level == "composed":  # without autograd's key nothing is recorded
        return threads() + constants(align=0)
    return f"""
    {threads()}
    {call("%mode8", door.GRAD_MODE, "", "i8")}
    {word("%x_impl", "%h", 0, "!llvm.ptr")}
    {call("%x8", door.REQUIRES_GRAD, "%x_impl: !llvm.ptr", "i8")}
    llvm.cond_br %weighted, ^weight_wants, ^wanted(%x8 : i8)
  ^weight_wants:
    {word("%w_impl", "%w", 0, "!llvm.ptr")}
    {call("%w8", door.REQUIRES_GRAD, "%w_impl: !llvm.ptr", "i8")}
    %either8 = llvm.or %x8, %w8 : i8
    llvm.br ^wanted(%either8 : i8)
  ^wanted(%any8: i8):
    %grad8 = llvm.and %any8, %mode8 : i8
    %grad64 = llvm.zext %grad8 : i8 to i64
    %align = llvm.and %grad64, %one : i64"""


def look_up(align: str, device: str, more: str = "") -> str:
    """%slot, %served: who serves the call of this type, weight, alignment and device. more: bits of the code."""
    return f"""
    {constants(weight_shift=door.WEIGHT_SHIFT, align_shift=door.ALIGN_SHIFT, device_shift=door.DEVICE_SHIFT)}
    {constants(sixtyfour=64)}
    %before = llvm.sub %rows, %one : i64
    %zeros = "llvm.intr.ctlz"(%before) <{{is_zero_poison = false}}> : (i64) -> i64
    %bucket = llvm.sub %sixtyfour, %zeros : i64
    %e0 = llvm.shl %wtype, %weight_shift : i64
    %e1 = llvm.shl {align}, %align_shift : i64
    %e2 = llvm.shl {device}, %device_shift : i64
    {fold("or", "%code", "%dt", "%e0", "%e1", "%e2", *([more] if more else []), kind="i64")}
    %slot = llvm.call @find(%width, %bucket, %code, %rows, %said) : (i64, i64, i64, i64, !llvm.ptr) -> !llvm.ptr
    %served = llvm.icmp "ne" %slot, %null : !llvm.ptr"""


def dense_sizes() -> str:
    """From ^results to ^empty: sizes and strides of y and rstd."""
    return f"""
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
    %type32 = llvm.trunc %type : i64 to i32
    %device32 = llvm.trunc %device : i64 to i32"""


def _run(two: bool, gpu: bool) -> str:
    """Fresh results, and the kernel; to ^leave or ^aten."""
    scalars = ["%eps_bits", "%rows", *([] if gpu else ["%width"]), "%stride", "%zero"]
    text = dense_sizes() + f"""
    {call("%a0", "aoti_torch_empty_strided", "%nd: i64, %ysz: !llvm.ptr, %yst: !llvm.ptr, %dt32: i32, %type32: i32, "
          "%device32: i32, %y_: !llvm.ptr")}
    %got0 = llvm.icmp "eq" %a0, %fine : i32
    llvm.cond_br %got0, ^statistics, ^aten
  ^statistics:
    %y = llvm.load %y_ : !llvm.ptr -> !llvm.ptr"""  # fmt: skip
    if two:
        text += f"""
    %f32_type = llvm.mlir.constant({door.F32} : i32) : i32
    {call("%a1", "aoti_torch_empty_strided", "%nd: i64, %rsz: !llvm.ptr, %rst: !llvm.ptr, %f32_type: i32, "
          "%type32: i32, %device32: i32, %r_: !llvm.ptr")}
    %got1 = llvm.icmp "eq" %a1, %fine : i32
    llvm.cond_br %got1, ^run, ^drop_y
  ^run:
    %r = llvm.load %r_ : !llvm.ptr -> !llvm.ptr
    {call("%a3", "aoti_torch_get_data_ptr", "%r: !llvm.ptr, %rp_: !llvm.ptr")}
    %rp = llvm.load %rp_ : !llvm.ptr -> i64"""  # fmt: skip
    else:  # nobody will see them
        text += f"""
    {constants(four=4)}
    %r_bytes = llvm.mul %rows, %four : i64
    {call("%r", "malloc", "%r_bytes: i64", "!llvm.ptr")}
    %got1 = llvm.icmp "ne" %r, %null : !llvm.ptr
    llvm.cond_br %got1, ^run, ^drop_y
  ^run:
    %rp = llvm.ptrtoint %r : !llvm.ptr to i64"""
    text += f"""
    {call("%a2", "aoti_torch_get_data_ptr", "%y: !llvm.ptr, %yp_: !llvm.ptr")}
    %yp = llvm.load %yp_ : !llvm.ptr -> i64
    {word("%xp", "%call", Word.ADDRESS.value)}
    {constants(form0=(3 + len(scalars)) if gpu else 0, form1=(4 + len(scalars)) if gpu else 1)}
    {constants(rows_at0=4, rows_at1=5, parts_at0=2 + len(scalars), parts_at1=3 + len(scalars))}
    llvm.cond_br %weighted, ^with_w, ^without_w"""
    for weighted in (False, True):
        values = ["%xp", *(["%wp"] if weighted else []), "%yp", "%rp", *scalars]
        text += f"\n  ^{'with' if weighted else 'without'}_w:"
        text += "".join(put(v, "%values", i) for i, v in enumerate(values))
        n = int(weighted)
        text += f"\n    llvm.br ^launch(%form{n}, %rows_at{n}, %parts_at{n} : i64, i64, i64)"
    text += f"""
  ^launch(%form: i64, %rows_at: i64, %parts_at: i64):
    %ran = llvm.call @norm_run(%slot, %call, %values, %form, %rows_at, %parts_at, {"%zero" if gpu else "%threads"})
           : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64, i64) -> i1"""
    if two:
        return text + f"""
    llvm.cond_br %ran, ^leave(%y, %r : !llvm.ptr, !llvm.ptr), ^drop
  ^drop:
    {call("%a4", "aoti_torch_delete_tensor_object", "%r: !llvm.ptr")}
    llvm.br ^drop_y
  ^drop_y:
    {call("%a5", "aoti_torch_delete_tensor_object", "%y: !llvm.ptr")}
    llvm.br ^aten"""
    return text + f"""
    {call("", "free", "%r: !llvm.ptr", "")}
    llvm.cond_br %ran, ^leave(%y : !llvm.ptr), ^drop_y
  ^drop_y:
    {call("%a5", "aoti_torch_delete_tensor_object", "%y: !llvm.ptr")}
    llvm.br ^aten"""


def _dispatch() -> str:
    """^dispatch: the fused operator, recorded by autograd; y of its results."""
    return f"""
  ^dispatch:
    {shape_and_weight("ours")}
    %has_epsours = llvm.zext %eps_given : i1 to i64
    {invoke(door.DISPATCHED, atens("ours"), "^dispatched", "^unwind")}
  ^dispatched:
    {_boxes("dispatched", False)}"""


def _checked() -> str:
    """On to ^original, or what is not sound to the operator that says so."""
    return f"""
    %sound = llvm.call @norm_sound(%h, %list, %w) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %sound, ^original, ^checked
  ^checked:
    {invoke(door.CHECKED, atens("aten"), "^single", "^unwind")}
  ^single:
    {call("%box_single", "malloc", "%eight: i64", "!llvm.ptr")}
    {word("%impl_single", "%both", 0)}
    {put("%impl_single", "%box_single", 0)}
    llvm.br ^leave(%box_single : !llvm.ptr)"""


def shape_and_weight(at: str) -> str:
    """%shapeAT, %nAT: the normalised shape; %optional: the weight as C++ hands it over."""
    return f"""
    {call(f"%{at}0", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    %n{at} = llvm.load %n_ : !llvm.ptr -> i64
    %room{at} = llvm.intr.umax(%n{at}, %one) : (i64, i64) -> i64
    %shape{at} = llvm.alloca %room{at} x i64 : (i64) -> !llvm.ptr
    llvm.br ^copy{at}(%zero : i64)
  ^copy{at}(%c{at}: i64):
    %left{at} = llvm.icmp "ult" %c{at}, %n{at} : i64
    llvm.cond_br %left{at}, ^item{at}, ^weight_of{at}
  ^item{at}:
    %place{at} = llvm.getelementptr %shape{at}[%c{at}] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    {call(f"%{at}1", "torch_list_get_item", f"%list: !llvm.ptr, %c{at}: i64, %place{at}: !llvm.ptr")}
    %next{at} = llvm.add %c{at}, %one : i64
    llvm.br ^copy{at}(%next{at} : i64)
  ^weight_of{at}:
    %has_w{at} = llvm.zext %weighted : i1 to i64
    {put(f"%has_w{at}", "%optional", 1)}
    llvm.cond_br %weighted, ^some_w{at}, ^ready{at}
  ^some_w{at}:
    {word(f"%impl{at}", "%w", 0)}
    {put(f"%impl{at}", "%optional", 0)}
    llvm.br ^ready{at}
  ^ready{at}:"""


def _boxes(at: str, two: bool) -> str:
    """What C++ returned in %both, of a std::tuple the last first, as handles: to ^leave; the second is dropped or not."""
    name = f"box_{at}"
    text = f"""
    {call(f"%{name}0", "malloc", "%eight: i64", "!llvm.ptr")}
    {call(f"%{name}1", "malloc", "%eight: i64", "!llvm.ptr")}
    {word(f"%{name}_second", "%both", 0)}
    {word(f"%{name}_first", "%both", 1)}
    {put(f"%{name}_first", f"%{name}0", 0)}
    {put(f"%{name}_second", f"%{name}1", 0)}"""
    if two:
        return text + f"\n    llvm.br ^leave(%{name}0, %{name}1 : !llvm.ptr, !llvm.ptr)"
    return text + f"""
    {call(f"%{name}2", "aoti_torch_delete_tensor_object", f"%{name}1: !llvm.ptr")}
    llvm.br ^leave(%{name}0 : !llvm.ptr)"""


def release(at: str) -> str:
    """Gives back what the stack owned; ends in block ^AT_end."""
    return f"""
    {call(f"%{at}_0", "aoti_torch_delete_tensor_object", "%h: !llvm.ptr")}
    {call(f"%{at}_1", "torch_delete_list", "%list: !llvm.ptr")}
    {call("", "free", "%eps_cell: !llvm.ptr", "")}
    llvm.cond_br %weighted, ^{at}_weight, ^{at}_end
  ^{at}_weight:
    {call(f"%{at}_2", "aoti_torch_delete_tensor_object", "%w: !llvm.ptr")}
    {call("", "free", "%w_cell: !llvm.ptr", "")}
    llvm.br ^{at}_end
  ^{at}_end:"""
