"""The entry of the doors for RMSNorm (x86_rms_door.py) that is backward: MLIR text.

What kernels do not take as it lies, and on the CPU what is not ours, goes on to an operator of Python's with the same
arguments; on a GPU, what is ATen's to ATen's own function.
"""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import (
    PERSONALITY,
    boxed,
    call,
    constants,
    dropped,
    fresh,
    invoke,
    put,
    pythons,
    room_for_fresh,
    strings,
    take,
    unwinding,
)
from .x86_rms_entry import (
    alignment,
    begin,
    dense_sizes,
    launch,
    launched,
    look_up,
    release,
    shape_and_weight,
    threads,
    weight,
)
from .x86_rms_tensors import Word

OWNED = (("%dy", "%h", "%rstd"), ("%list", "%mask"))  # by the stack, besides the weight
PYTHONS = "flykernels::_rms_norm_backward"  # the operator of Python's


def names() -> str:
    """Globals that `backward` names."""
    return strings(overload="", failed="the gradient of rms_norm failed", pythons=PYTHONS)


def backward(entry: str, device_type: int, gpu: bool) -> str:
    """aten::_fused_rms_norm_backward(dy, x, shape, rstd, weight, mask): (dx, dweight)."""
    return f"""
  llvm.func @{entry}(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {take("%stack", "!llvm.ptr", dy=0, h=1, list=2, rstd=3, w_cell=4, mask=5)}
    {room_for_fresh("dx", "dw")}
    {begin(device_type, "rp_", "m0_", "m1_", calls=("call", "call_dy"))}
    {_wishes()}
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
    {weight("^python")}
    %rp = llvm.load %rp_ : !llvm.ptr -> i64
    {take("%call_dy", dy_low=Word.LOW, dyp=Word.ADDRESS, dy_stride=Word.STRIDE)}
    {alignment("%align", "%wp", "%dy_low") if gpu else threads() + constants(align=1)}
    {look_up("%align", "%device" if gpu else "%threads", "^results", "^aten" if gpu else "^python", "%what")}
    {_run(gpu)}
    {_atens() if gpu else ""}
    {pythons("pythons")}
  ^leave(%out0: !llvm.ptr, %out1: !llvm.ptr):
    {release("leave", *OWNED)}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr")}
    llvm.return
    {unwinding(release("unwind", *OWNED))}
  }}"""  # fmt: skip


def _wishes() -> str:
    """%wants_dx, %wants_dw, %wants (either); %what: the bits of the code that say so."""
    return f"""
    {constants(back=1 << door.BACKWARD_BIT, dw_bit=door.WEIGHT_GRADIENT_BIT)}
    {call("%k0", "torch_list_get_item", "%mask: !llvm.ptr, %zero: i64, %m0_: !llvm.ptr")}
    {call("%k1", "torch_list_get_item", "%mask: !llvm.ptr, %one: i64, %m1_: !llvm.ptr")}
    {take("%m0_", m0w=0)}
    {take("%m1_", m1w=0)}
    %m0 = llvm.and %m0w, %one : i64
    %m1 = llvm.and %m1w, %one : i64
    %has_w = llvm.zext %weighted : i1 to i64
    %wanted_dw = llvm.and %m1, %has_w : i64
    %any = llvm.or %m0, %wanted_dw : i64
    %wants_dw = llvm.icmp "ne" %wanted_dw, %zero : i64
    %wants_dx = llvm.icmp "ne" %m0, %zero : i64
    %wants = llvm.icmp "ne" %any, %zero : i64
    %dw_code = llvm.shl %wanted_dw, %dw_bit : i64
    %what = llvm.or %dw_code, %back : i64"""


def _run(gpu: bool) -> str:
    """^results: fresh ones, and the kernels; to ^leave or ^python."""
    scalars = ["%rows", *([] if gpu else ["%width"]), "%stride", "%dy_stride", "%zero"]

    def go(*pointers: str) -> str:
        """To ^launch; on the CPU its forms are numbered."""
        n = len(pointers)
        return launch(n + len(scalars) if gpu else n - 2, n, n + len(scalars) - 1, [*pointers, *scalars])

    return f"""
    {dense_sizes()}
    {fresh("dx", "%nd, %ysz, %yst, %dt32", "%type32, %device32", "^python")}
    llvm.cond_br %wants_dw, ^weights, ^no_weights
  ^no_weights:
    {call("%a3", "aoti_torch_new_uninitialized_tensor", "%dw_: !llvm.ptr")}
    %got1 = llvm.icmp "eq" %a3, %fine : i32
    llvm.cond_br %got1, ^either, ^drop_dx
  ^weights:
    %w_sizes = llvm.getelementptr %ysz[%outer] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %w_strides = llvm.getelementptr %yst[%outer] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %wt32 = llvm.trunc %wtype : i64 to i32
    {fresh("dw", "%axes, %w_sizes, %w_strides, %wt32", "%type32, %device32", "^drop_dx")}
    {go("%xp", "%wp", "%rp", "%dyp", "%dx_at", "%dw_at")}
  ^either:
    llvm.cond_br %weighted, ^with_w, ^without_w
  ^with_w:
    {go("%xp", "%wp", "%rp", "%dyp", "%dx_at")}
  ^without_w:
    {go("%xp", "%rp", "%dyp", "%dx_at")}
    {launched(gpu)}
    {take("%dw_", "!llvm.ptr", out=0)}
    llvm.cond_br %ran, ^keep, ^drop
  ^keep:
    llvm.cond_br %wants_dx, ^leave(%dx, %out : !llvm.ptr, !llvm.ptr), ^unwanted
  ^unwanted:
    {dropped("%dx")}
    {call("%a7", "aoti_torch_new_uninitialized_tensor", "%dx_: !llvm.ptr")}
    {take("%dx_", "!llvm.ptr", nothing=0)}
    llvm.br ^leave(%nothing, %out : !llvm.ptr, !llvm.ptr)
  ^drop:
    {dropped("%out")}
    llvm.br ^drop_dx
  ^drop_dx:
    {dropped("%dx")}
    llvm.br ^python"""


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
    {boxed("box", 1, 0)}
    llvm.br ^leave(%box0, %box1 : !llvm.ptr, !llvm.ptr)"""  # fmt: skip
