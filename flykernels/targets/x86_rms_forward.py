"""The entries of the doors for RMSNorm (x86_rms_door.py) that are forward: MLIR text.

fused        aten::_fused_rms_norm below autograd, on a GPU or the CPU: (y, rstd)
composed     aten::rms_norm on the CPU below autograd: y
autograd     aten::rms_norm on the CPU's autograd key: y. It runs nothing: what is ours goes on to
             aten::_fused_rms_norm and so to ATen's derivative of it, all else to what ATen composes
"""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import (
    PERSONALITY,
    all_of,
    boxed,
    call,
    constants,
    dropped,
    fresh,
    invoke,
    outside,
    put,
    room_for_fresh,
    take,
    unwinding,
    word,
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

LEVELS = ("fused", "composed", "autograd")
OWNED = (("%h",), ("%list",), "%eps_cell")  # by the stack, besides the weight


def forward(entry: str, level: str, device_type: int, gpu: bool) -> str:
    """One entry. device_type: DeviceType's number of its tensors."""
    two = level == "fused"
    outs = "%out0: !llvm.ptr, %out1: !llvm.ptr" if two else "%out0: !llvm.ptr"
    return f"""
  llvm.func @{entry}(%stack: !llvm.ptr, %arguments: i64, %results: i64) {PERSONALITY} {{
    {take("%stack", "!llvm.ptr", h=0, list=1, w_cell=2, eps_cell=3)}
    {room_for_fresh("y", "r")}
    {begin(device_type)}
    {_eps()}
    {_nobody_looks_on() if level == "autograd" else ""}
    %asked = llvm.call @norm_rows(%h, %list, %call) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %asked, ^weight, ^aten
  ^weight:
    {weight("^aten")}
    {alignment("%align", "%wp") if gpu else _wanted(level)}
    {look_up("%align", "%device" if gpu else "%threads", "^dispatch" if level == "autograd" else "^results", "^aten")}
    {_dispatch() if level == "autograd" else _run(two, gpu)}
  ^aten:
    {shape_and_weight("aten")}
    %has_epsaten = llvm.zext %eps_given : i1 to i64
    {"llvm.br ^original" if two else _checked()}
  ^original:
    {invoke("rms_norm" if gpu else door.COMPOSED, atens("aten"), "^boxes", "^unwind")}
  ^boxes:
    {_left("box", two)}
  ^leave({outs}):
    {release("leave", *OWNED)}
    {put("%out0", "%stack", 0, "!llvm.ptr")}
    {put("%out1", "%stack", 1, "!llvm.ptr") if two else ""}
    llvm.return
    {unwinding(release("unwind", *OWNED))}
  }}"""  # fmt: skip


def _eps() -> str:
    """%eps and %eps_bits (of f32), ATen's where none is given."""
    return f"""
    {constants(default_eps=door.EPS_BITS)}
    %eps_given = llvm.icmp "ne" %eps_cell, %null : !llvm.ptr
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
  ^start(%eps: f64, %eps_bits: i64):"""


def atens(at: str) -> str:
    """Arguments of ATen's functions, made by `shape_and_weight(at)`; what they return goes to %both."""
    return (
        f"%both: !llvm.ptr, %h: !llvm.ptr, %shape{at}: !llvm.ptr, %n{at}: i64, %optional: !llvm.ptr, %eps: f64, "
        f"%has_eps{at}: i64"
    )


def _nobody_looks_on() -> str:
    """On to ^unseen, or to ^aten where a mode, a transform, a tensor's class or forward mode wants to see what ATen
    composes."""
    return f"""
    {call("%modes", door.MODES, "", "i64")}
    {call("%layers", door.LAYERS, "", "!llvm.ptr")}
    {word("%layer0", "%layers", 0)}
    {word("%layer1", "%layers", 1)}
    {call("%looks8", door.LOOKS_ON, "%h: !llvm.ptr", "i8")}
    %no8 = llvm.mlir.constant(0 : i8) : i8
    %unlooked = llvm.icmp "eq" %looks8, %no8 : i8
    {outside("%undefined", door.UNDEFINED)}
    {_no_tangent("%x_still", "%h")}
    {all_of("%alone", "%unlooked", "%modes eq %zero", "%layer0 eq %layer1", "%x_still")}
    llvm.cond_br %alone, ^weight_looks, ^aten
  ^weight_looks:
    llvm.cond_br %weighted, ^ask_weight, ^unseen
  ^ask_weight:
    {call("%looks8_", door.LOOKS_ON, "%w: !llvm.ptr", "i8")}
    %s3 = llvm.icmp "eq" %looks8_, %no8 : i8
    {_no_tangent("%w_still", "%w")}
    {all_of("%w_alone", "%s3", "%w_still")}
    llvm.cond_br %w_alone, ^unseen, ^aten
  ^unseen:"""


def _no_tangent(result: str, handle: str) -> str:
    """result = whether no tangent comes with a tensor. (ATen's derivative of the fused operator makes tangents f32.)"""
    return f"""
    {word(f"{result}_impl", handle, 0, "!llvm.ptr")}
    {call(f"{result}_at", door.TANGENT, f"{result}_impl: !llvm.ptr, %zero: i64, {handle}: !llvm.ptr", "!llvm.ptr")}
    {word(f"{result}_tangent", f"{result}_at", 0, "!llvm.ptr")}
    {result} = llvm.icmp "eq" {result}_tangent, %undefined : !llvm.ptr"""


def _wanted(level: str) -> str:
    """%align = 1 if a gradient is wanted; %threads. To ^aten where autograd could not keep x for it."""
    if level == "composed":  # without autograd's key nothing is recorded
        return threads() + constants(align=0)
    return f"""
    {threads()}
    {call("%of_inference8", door.INFERENCE, "%h: !llvm.ptr", "i8") if level == "autograd" else ""}
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
    %align = llvm.and %grad64, %one : i64
    {_kept() if level == "autograd" else ""}"""


def _kept() -> str:
    return """
    %unkept8 = llvm.and %of_inference8, %grad8 : i8
    %kept = llvm.icmp "eq" %unkept8, %no8 : i8
    llvm.cond_br %kept, ^kept, ^aten
  ^kept:"""


def _run(two: bool, gpu: bool) -> str:
    """^results: fresh ones, and the kernel; to ^leave or ^aten."""
    scalars = ["%eps_bits", "%rows", *([] if gpu else ["%width"]), "%stride", "%zero"]
    rstd = fresh("r", "%nd, %rsz, %rst, %f32_type", "%type32, %device32", "^drop_y") if two else _unseen()
    launches = ""
    for weighted in (False, True):
        pointers = ["%xp", *(["%wp"] if weighted else []), "%y_at", "%r_at"]
        n = len(pointers)
        form = n + len(scalars) if gpu else int(weighted)
        launches += f"\n  ^{'with' if weighted else 'without'}_w:"
        launches += launch(form, n + 1, n + len(scalars) - 1, [*pointers, *scalars])
    drop_r = lambda: dropped("%r") if two else call("", "free", "%r: !llvm.ptr", "")
    return f"""
    {dense_sizes()}
    %f32_type = llvm.mlir.constant({door.F32} : i32) : i32
    {fresh("y", "%nd, %ysz, %yst, %dt32", "%type32, %device32", "^aten")}
    {rstd}
    llvm.cond_br %weighted, ^with_w, ^without_w
    {launches}
    {launched(gpu)}
    llvm.cond_br %ran, ^ran, ^drop
  ^ran:
    {"" if two else drop_r()}
    llvm.br ^leave({"%y, %r : !llvm.ptr, !llvm.ptr" if two else "%y : !llvm.ptr"})
  ^drop:
    {drop_r()}
    llvm.br ^drop_y
  ^drop_y:
    {dropped("%y")}
    llvm.br ^aten"""


def _unseen() -> str:
    """%r, %r_at: room for rstd that nobody will see."""
    return f"""
    {constants(four=4)}
    %r_bytes = llvm.mul %rows, %four : i64
    {call("%r", "malloc", "%r_bytes: i64", "!llvm.ptr")}
    %r_got = llvm.icmp "ne" %r, %null : !llvm.ptr
    llvm.cond_br %r_got, ^r_made, ^drop_y
  ^r_made:
    %r_at = llvm.ptrtoint %r : !llvm.ptr to i64"""


def _dispatch() -> str:
    """^dispatch: the fused operator, recorded by autograd; y of its results."""
    return f"""
  ^dispatch:
    {shape_and_weight("ours")}
    %has_epsours = llvm.zext %eps_given : i1 to i64
    {invoke(door.DISPATCHED, atens("ours"), "^dispatched", "^unwind")}
  ^dispatched:
    {_left("dispatched", False)}"""


def _checked() -> str:
    """On to ^original, or what is not sound to the operator that says so."""
    return f"""
    %sound = llvm.call @norm_sound(%h, %list, %w) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1
    llvm.cond_br %sound, ^original, ^checked
  ^checked:
    {invoke(door.CHECKED, atens("aten"), "^single", "^unwind")}
  ^single:
    {boxed("single", 0)}
    llvm.br ^leave(%single0 : !llvm.ptr)"""


def _left(name: str, two: bool) -> str:
    """To ^leave with both tensors that C++ returned, or with the first."""
    if two:
        return boxed(name, 1, 0) + f"\n    llvm.br ^leave(%{name}0, %{name}1 : !llvm.ptr, !llvm.ptr)"
    return boxed(name, 1, 0) + dropped(f"%{name}1") + f"\n    llvm.br ^leave(%{name}0 : !llvm.ptr)"
