"""The entry of the doors for RMSNorm (x86_rms_door.py) that is backward: MLIR text.

What kernels do not take as it lies, and on the CPU what is not ours, goes on to an operator of Python's with the same
arguments; on a GPU, what is ATen's to ATen's own function.
"""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import PERSONALITY, call, constants, fold, invoke, put, room, say, word
from .x86_rms_forward import alignment, dense_sizes, look_up, shape_and_weight, threads
from .x86_rms_tensors import CALL_WORDS, Word

PYTHONS = "flykernels::_rms_norm_backward"  # the operator of Python's


def names() -> str:
    """Globals that `backward` names."""
    return f"""
  llvm.mlir.global internal constant @pythons("{PYTHONS}\\00") {{addr_space = 0 : i32}}
  llvm.mlir.global internal constant @overload("\\00") {{addr_space = 0 : i32}}
  llvm.mlir.global internal constant @failed("the gradient of rms_norm failed; the log says why\\00") {{addr_space = 0 : i32}}"""


def backward(entry: str, device_type: int, gpu: bool) -> str:
    """aten::_fused_rms_norm_backward(dy, x, shape, rstd, weight, mask): (dx, dweight)."""
    return f"""
  llvm.func @{entry}(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {word("%dy", "%stack", 0, "!llvm.ptr")}
    {word("%h", "%stack", 1, "!llvm.ptr")}
    {word("%list", "%stack", 2, "!llvm.ptr")}
    {word("%rstd", "%stack", 3, "!llvm.ptr")}
    {word("%w_cell", "%stack", 4, "!llvm.ptr")}
    {word("%mask", "%stack", 5, "!llvm.ptr")}
    {constants(zero=0, one=1, minus=-1, cells=CALL_WORDS, type=device_type, rank_most=door.DIMENSIONS_MOST)}
    {constants(no_weight=door.NO_WEIGHT, eight=8, two_words=2, back=1 << door.BACKWARD_BIT)}
    {constants(dw_bit=door.WEIGHT_GRADIENT_BIT)}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %call = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %call_dy = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %values = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr
    %ysz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %yst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rsz = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %rst = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %both = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    %optional = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr
    {room("x_", "xp_", "d_", "dp_", "wp_", "rp_", "said", "n_", "threads_", "m0_", "m1_")}
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    llvm.store %zero, %wp_ : i64, !llvm.ptr
    llvm.store %zero, %threads_ : i64, !llvm.ptr
    %weighted = llvm.icmp "ne" %w_cell, %null : !llvm.ptr
    {call("%k0", "torch_list_get_item", "%mask: !llvm.ptr, %zero: i64, %m0_: !llvm.ptr")}
    {call("%k1", "torch_list_get_item", "%mask: !llvm.ptr, %one: i64, %m1_: !llvm.ptr")}
    %m0w = llvm.load %m0_ : !llvm.ptr -> i64
    %m1w = llvm.load %m1_ : !llvm.ptr -> i64
    %m0 = llvm.and %m0w, %one : i64
    %m1 = llvm.and %m1w, %one : i64
    %has_w = llvm.zext %weighted : i1 to i64
    %dw = llvm.and %m1, %has_w : i64
    %any = llvm.or %m0, %dw : i64
    %wants_dw = llvm.icmp "ne" %dw, %zero : i64
    %wants_dx = llvm.icmp "ne" %m0, %zero : i64
    %wants = llvm.icmp "ne" %any, %zero : i64
    llvm.cond_br %weighted, ^unpack_w, ^unpacked_w(%null : !llvm.ptr)
  ^unpack_w:
    %w1 = llvm.load %w_cell : !llvm.ptr -> !llvm.ptr
    llvm.br ^unpacked_w(%w1 : !llvm.ptr)
  ^unpacked_w(%w: !llvm.ptr):
    llvm.cond_br %wants, ^rows, ^python
  ^rows:
    %asked = llvm.call @norm_rows(%h, %list, %call) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %asked, ^gradient, ^{"aten" if gpu else "python"}
  ^gradient:
    %asked_dy = llvm.call @norm_rows(%dy, %list, %call_dy) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %asked_dy, ^statistics, ^python
  ^statistics:
    %same = llvm.call @norm_same(%call, %call_dy) : (!llvm.ptr, !llvm.ptr) -> i1
    %stat = llvm.call @norm_rstd(%rstd, %call, %type, %rp_) : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i1
    %good = llvm.and %same, %stat : i1
    llvm.cond_br %good, ^weight, ^python
  ^weight:
    llvm.cond_br %weighted, ^check_weight, ^find(%no_weight : i64)
  ^check_weight:
    %wt = llvm.call @norm_weight(%w, %call, %type, %wp_) : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i64
    %wrong = llvm.icmp "eq" %wt, %minus : i64
    llvm.cond_br %wrong, ^python, ^find(%wt : i64)
  ^find(%wtype: i64):
    %wp = llvm.load %wp_ : !llvm.ptr -> i64
    %rp = llvm.load %rp_ : !llvm.ptr -> i64
    {word("%rows", "%call", Word.ROWS.value)}
    {word("%width", "%call", Word.WIDTH.value)}
    {word("%stride", "%call", Word.STRIDE.value)}
    {word("%nd", "%call", Word.RANK.value)}
    {word("%sz", "%call", Word.SIZES.value, "!llvm.ptr")}
    {word("%dt", "%call", Word.TYPE.value)}
    {word("%axes", "%call", Word.AXES.value)}
    {word("%device", "%call", Word.DEVICE.value)}
    {word("%dy_low", "%call_dy", Word.LOW.value)}
    {word("%dyp", "%call_dy", Word.ADDRESS.value)}
    {word("%dy_stride", "%call_dy", Word.STRIDE.value)}
    {word("%xp", "%call", Word.ADDRESS.value)}
    {alignment("%align", "%wp", "%dy_low") if gpu else threads() + constants(align=1)}
    %dw_code = llvm.shl %dw, %dw_bit : i64
    %what = llvm.or %dw_code, %back : i64
    {look_up("%align", "%device" if gpu else "%threads", "%what")}
    llvm.cond_br %served, ^results, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail(%message : !llvm.ptr), ^{"aten" if gpu else "python"}
  ^fail(%text: !llvm.ptr):
    {say("%text", "^python", "^unwind")}
    {_run(gpu)}
    {_atens() if gpu else ""}
  ^python:
    %op = llvm.mlir.addressof @pythons : !llvm.ptr
    %over = llvm.mlir.addressof @overload : !llvm.ptr
    {call("%p0", "aoti_torch_call_dispatcher", "%op: !llvm.ptr, %over: !llvm.ptr, %stack: !llvm.ptr")}
    %went = llvm.icmp "eq" %p0, %fine : i32
    llvm.cond_br %went, ^gone, ^lost
  ^lost:
    %sorry = llvm.mlir.addressof @failed : !llvm.ptr
    {say("%sorry", "^gone", "^unwind_only")}
  ^gone:
    llvm.return
  ^unwind_only:
    %exception2 = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    llvm.resume %exception2 : !llvm.struct<(ptr, i32)>
  ^leave(%out0: !llvm.ptr, %out1: !llvm.ptr):
    {_release("leave")}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr")}
    llvm.return
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {_release("unwind")}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>
  }}"""  # fmt: skip


def _run(gpu: bool) -> str:
    """Fresh results, and the kernels; to ^leave or ^python."""
    scalars = ["%rows", *([] if gpu else ["%width"]), "%stride", "%dy_stride", "%zero"]
    text = dense_sizes() + f"""
    {call("%a0", "aoti_torch_empty_strided", "%nd: i64, %ysz: !llvm.ptr, %yst: !llvm.ptr, %dt32: i32, %type32: i32, "
          "%device32: i32, %x_: !llvm.ptr")}
    %got0 = llvm.icmp "eq" %a0, %fine : i32
    llvm.cond_br %got0, ^second, ^python
  ^second:
    %dx = llvm.load %x_ : !llvm.ptr -> !llvm.ptr
    {call("%a2", "aoti_torch_get_data_ptr", "%dx: !llvm.ptr, %xp_: !llvm.ptr")}
    %dxp = llvm.load %xp_ : !llvm.ptr -> i64
    llvm.cond_br %wants_dw, ^weights, ^no_weights
  ^no_weights:
    {call("%a3", "aoti_torch_new_uninitialized_tensor", "%d_: !llvm.ptr")}
    %got1 = llvm.icmp "eq" %a3, %fine : i32
    llvm.cond_br %got1, ^either, ^drop_dx
  ^weights:
    %w_sizes = llvm.getelementptr %ysz[%outer] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %w_strides = llvm.getelementptr %yst[%outer] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %wt32 = llvm.trunc %wtype : i64 to i32
    {call("%a4", "aoti_torch_empty_strided", "%axes: i64, %w_sizes: !llvm.ptr, %w_strides: !llvm.ptr, %wt32: i32, "
          "%type32: i32, %device32: i32, %d_: !llvm.ptr")}
    %got2 = llvm.icmp "eq" %a4, %fine : i32
    llvm.cond_br %got2, ^run, ^drop_dx
  ^run:
    %dweight = llvm.load %d_ : !llvm.ptr -> !llvm.ptr
    {call("%a5", "aoti_torch_get_data_ptr", "%dweight: !llvm.ptr, %dp_: !llvm.ptr")}
    %dwp = llvm.load %dp_ : !llvm.ptr -> i64
    {_values(["%xp", "%wp", "%rp", "%dyp", "%dxp", "%dwp"], scalars)}
    {_go("10" if gpu else "4", "6", str(5 + len(scalars)))}
  ^either:
    llvm.cond_br %weighted, ^with_w, ^without_w
  ^with_w:
    {_values(["%xp", "%wp", "%rp", "%dyp", "%dxp"], scalars)}
    {_go("9" if gpu else "3", "5", str(4 + len(scalars)))}
  ^without_w:
    {_values(["%xp", "%rp", "%dyp", "%dxp"], scalars)}
    {_go("8" if gpu else "2", "4", str(3 + len(scalars)))}
  ^launch(%form: i64, %rows_at: i64, %parts_at: i64):
    %out = llvm.load %d_ : !llvm.ptr -> !llvm.ptr
    %ran = llvm.call @norm_run(%slot, %call, %values, %form, %rows_at, %parts_at, {"%zero" if gpu else "%threads"})
           : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64, i64) -> i1
    llvm.cond_br %ran, ^keep, ^drop
  ^keep:
    llvm.cond_br %wants_dx, ^leave(%dx, %out : !llvm.ptr, !llvm.ptr), ^unwanted
  ^unwanted:
    {call("%a6", "aoti_torch_delete_tensor_object", "%dx: !llvm.ptr")}
    {call("%a7", "aoti_torch_new_uninitialized_tensor", "%x_: !llvm.ptr")}
    %nothing = llvm.load %x_ : !llvm.ptr -> !llvm.ptr
    llvm.br ^leave(%nothing, %out : !llvm.ptr, !llvm.ptr)
  ^drop:
    {call("%a8", "aoti_torch_delete_tensor_object", "%out: !llvm.ptr")}
    llvm.br ^drop_dx
  ^drop_dx:
    {call("%a9", "aoti_torch_delete_tensor_object", "%dx: !llvm.ptr")}
    llvm.br ^python"""  # fmt: skip
    return text


def _values(pointers: list[str], scalars: list[str]) -> str:
    return "".join(put(v, "%values", i) for i, v in enumerate([*pointers, *scalars]))


_forms = iter(range(1 << 30))


def _go(form: str, rows_at: str, parts_at: str) -> str:
    n = f"go{next(_forms)}"
    text = constants(**{f"{n}f": int(form), f"{n}r": int(rows_at), f"{n}p": int(parts_at)})
    return text + f"\n    llvm.br ^launch(%{n}f, %{n}r, %{n}p : i64, i64, i64)"


def _atens() -> str:
    """^aten: ATen's own function."""
    return f"""
  ^aten:
    {shape_and_weight("aten")}
    {constants(eight_bits=8)}
    %m1_up = llvm.shl %m1, %eight_bits : i64
    %masks = llvm.or %m0, %m1_up : i64
    {invoke("rms_norm_backward", "%both: !llvm.ptr, %dy: !llvm.ptr, %h: !llvm.ptr, %shapeaten: !llvm.ptr, %naten: i64, "
            "%rstd: !llvm.ptr, %optional: !llvm.ptr, %masks: i64", "^boxes", "^unwind")}
  ^boxes:
    {call("%box0", "malloc", "%eight: i64", "!llvm.ptr")}
    {call("%box1", "malloc", "%eight: i64", "!llvm.ptr")}
    {word("%box_second", "%both", 0)}
    {word("%box_first", "%both", 1)}
    {put("%box_first", "%box0", 0)}
    {put("%box_second", "%box1", 0)}
    llvm.br ^leave(%box0, %box1 : !llvm.ptr, !llvm.ptr)"""  # fmt: skip


def _release(at: str) -> str:
    """Gives back what the stack owned; ends in block ^AT_end."""
    tensors = "".join(
        call(f"%{at}_{n}", "aoti_torch_delete_tensor_object", f"%{n}: !llvm.ptr") for n in ("dy", "h", "rstd")
    )
    lists = "".join(call(f"%{at}_{n}", "torch_delete_list", f"%{n}: !llvm.ptr") for n in ("list", "mask"))
    return f"""
    {tensors}
    {lists}
    llvm.cond_br %weighted, ^{at}_weight, ^{at}_end
  ^{at}_weight:
    {call(f"%{at}_w", "aoti_torch_delete_tensor_object", "%w: !llvm.ptr")}
    {call("", "free", "%w_cell: !llvm.ptr", "")}
    llvm.br ^{at}_end
  ^{at}_end:"""
