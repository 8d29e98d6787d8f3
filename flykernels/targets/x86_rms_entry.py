"""What the entries of the doors for RMSNorm (x86_rms_door.py) have in common: MLIR text of their beginning, the look-up
and the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..launch import torch_door as door
from .x86_door import call, constants, dropped, fold, put, room, served, take, word
from .x86_door_axes import lay_out
from .x86_rms_tensors import CALL_WORDS, Word

_launches = itertools.count()
VECTOR = 16  # bytes: a larger alignment says nothing more


def begin(device_type: int, *cells: str, calls: Sequence[str] = ("call",)) -> str:
    """Constants, and room for what is asked: `cells` of a word each, `calls` of a call's words each. Takes %w_cell;
    %w is the weight, or null."""
    buffers = "".join(f"\n    %{name} = llvm.alloca %cells x i64 : (i64) -> !llvm.ptr" for name in (*calls, "values"))
    axes = "".join(
        f"\n    %{name} = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr" for name in ("ysz", "yst", "rsz", "rst")
    )
    pairs = "".join(
        f"\n    %{name} = llvm.alloca %two_words x i64 : (i64) -> !llvm.ptr" for name in ("both", "optional")
    )
    return f"""
    {constants(zero=0, one=1, minus=-1, cells=CALL_WORDS, type=device_type, rank_most=door.DIMENSIONS_MOST)}
    {constants(no_weight=door.NO_WEIGHT, eight=8, two_words=2)}
    %null = llvm.mlir.zero : !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    {buffers}
    {axes}
    {pairs}
    {room("wp_", "said", "n_", "threads_", *cells)}
    llvm.store %null, %said : !llvm.ptr, !llvm.ptr
    llvm.store %zero, %wp_ : i64, !llvm.ptr
    llvm.store %zero, %threads_ : i64, !llvm.ptr
    %weighted = llvm.icmp "ne" %w_cell, %null : !llvm.ptr
    llvm.cond_br %weighted, ^unpack_w, ^unpacked_w(%null : !llvm.ptr)
  ^unpack_w:
    %w1 = llvm.load %w_cell : !llvm.ptr -> !llvm.ptr
    llvm.br ^unpacked_w(%w1 : !llvm.ptr)
  ^unpacked_w(%w: !llvm.ptr):"""


def weight(otherwise: str) -> str:
    """To ^find(its type, or NO_WEIGHT), or to `otherwise`; there the words of the call are at hand."""
    return f"""
    llvm.cond_br %weighted, ^check_weight, ^find(%no_weight : i64)
  ^check_weight:
    %wt = llvm.call @norm_weight(%w, %call, %type, %wp_) : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i64
    %wrong = llvm.icmp "eq" %wt, %minus : i64
    llvm.cond_br %wrong, {otherwise}, ^find(%wt : i64)
  ^find(%wtype: i64):
    %wp = llvm.load %wp_ : !llvm.ptr -> i64
    {take("%call", xp=Word.ADDRESS, rows=Word.ROWS, width=Word.WIDTH, stride=Word.STRIDE, nd=Word.RANK)}
    {take("%call", dt=Word.TYPE, axes=Word.AXES, device=Word.DEVICE)}
    {take("%call", "!llvm.ptr", sz=Word.SIZES)}"""


def alignment(result: str, *addresses: str) -> str:
    """result = the largest power of two, up to VECTOR, that divides x's rows and these addresses."""
    text = word("%x_low", "%call", Word.LOW.value) + constants(low=VECTOR)
    return (
        text
        + f"""
    {fold("or", "%l1", "%x_low", "%low", *addresses, kind="i64")}
    %l2 = llvm.sub %zero, %l1 : i64
    {result} = llvm.and %l1, %l2 : i64"""
    )


def threads() -> str:
    """%threads: as many as torch uses."""
    return f"""
    {call("%t0", "torch_get_num_threads", "%threads_: !llvm.ptr")}
    %threads32 = llvm.load %threads_ : !llvm.ptr -> i32
    %threads = llvm.zext %threads32 : i32 to i64"""


def look_up(align: str, device: str, found: str, otherwise: str, more: str = "") -> str:
    """To block `found` with the %slot that serves the call of this type, weight, alignment and device, or to
    `otherwise`. more: bits of the code."""
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
    {served("%width, %bucket, %code, %rows", found, otherwise)}"""


def dense_sizes() -> str:
    """From ^results to ^empty: sizes and strides of y and rstd."""
    of_r = """
    %in_row = llvm.icmp "sge" %i, %outer : i64
    %rs = llvm.select %in_row, %one, %s : i1, i64"""
    return f"""
  ^results:
    %outer = llvm.sub %nd, %axes : i64
    {lay_out("%nd", "%sz", "^empty", [("%s", "%ysz", "%yst"), ("%rs", "%rsz", "%rst")], of_r)}
  ^empty:
    %dt32 = llvm.trunc %dt : i64 to i32
    %type32 = llvm.trunc %type : i64 to i32
    %device32 = llvm.trunc %device : i64 to i32"""


def launch(form: int, rows_at: int, parts_at: int, values: Sequence[str]) -> str:
    """To ^launch with these values: see x86_rms_launch.py."""
    n = f"go{next(_launches)}"
    numbers = constants(**{f"{n}f": form, f"{n}r": rows_at, f"{n}p": parts_at})
    filled = "".join(put(v, "%values", i) for i, v in enumerate(values))
    return filled + numbers + f"\n    llvm.br ^launch(%{n}f, %{n}r, %{n}p : i64, i64, i64)"


def launched(gpu: bool) -> str:
    """^launch, and whether the kernel %ran."""
    return f"""
  ^launch(%form: i64, %rows_at: i64, %parts_at: i64):
    %ran = llvm.call @norm_run(%slot, %call, %values, %form, %rows_at, %parts_at, {"%zero" if gpu else "%threads"})
           : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64, i64) -> i1"""


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


def release(at: str, tensors: Sequence[str], lists: Sequence[str], *cells: str) -> str:
    """Gives back what the stack owned, the weight too; ends in block ^AT_end. cells: of malloc."""
    given = "".join(call(f"%{at}_{n[1:]}", "torch_delete_list", f"{n}: !llvm.ptr") for n in lists)
    freed = "".join(call("", "free", f"{n}: !llvm.ptr", "") for n in cells)
    return f"""
    {dropped(*tensors)}
    {given}
    {freed}
    llvm.cond_br %weighted, ^{at}_weight, ^{at}_end
  ^{at}_weight:
    {dropped("%w")}
    {call("", "free", "%w_cell: !llvm.ptr", "")}
    llvm.br ^{at}_end
  ^{at}_end:"""
