"""What the doors for RMSNorm (x86_rms_door.py) ask of tensors: MLIR text of functions inside their object.

A *call* is 12 words that `norm_rows` writes of x; `Word` says what lies where.
"""

from __future__ import annotations

import enum

from ..launch import torch_door as door
from .x86_door import all_of, ask, call, constants, element, fill, room, room_to_ask, take, word
from .x86_door_axes import collapsed, dense


class Word(enum.IntEnum):
    """The words of a call."""

    ADDRESS = 0
    ROWS = 1
    WIDTH = 2
    STRIDE = 3  # elements from one row to the next
    RANK = 4
    SIZES = 5  # address
    TYPE = 6  # ScalarType's number
    AXES = 7  # that make a row
    DEVICE = 8  # its number
    LOW = 9  # address and, where it matters, bytes from row to row, or'ed: for alignment


CALL_WORDS = 12


def rows() -> str:
    """norm_rows(x, shape, call): 1 if kernels may be asked, and then call is filled in."""
    named = f"""
    %j = llvm.sub %i, %outer : i64
    {call("%r6", "torch_list_get_item", "%list: !llvm.ptr, %j: i64, %item_: !llvm.ptr")}
    %w = llvm.load %item_ : !llvm.ptr -> i64"""
    return f"""
  llvm.func internal @norm_rows(%h: !llvm.ptr, %list: !llvm.ptr, %call: !llvm.ptr) -> i1 {{
    {room_to_ask("x", "nd", "dt", "sz", "st", "dev")}
    {room_to_ask("a", "at")}
    {room("n_", "item_")}
    {constants(zero=0, one=1, three=3, rank_most=door.DIMENSIONS_MOST)}
    %outer_ = llvm.alloca %three x i64 : (i64) -> !llvm.ptr
    {ask("%h", "x", "nd", "dt", "sz", "st", "dev")}
    {call("%r5", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    {element("x", "%xdt", door.FLOATS)}
    %n = llvm.load %n_ : !llvm.ptr -> i64
    {all_of("%a", "%xread", "%xtyped", "%n sge %one", "%n sle %xnd", "%xnd sle %rank_most")}
    %outer = llvm.sub %xnd, %n : i64
    llvm.cond_br %a, ^axis(%xnd, %one : i64, i64), ^no
    {dense("%xsz", "%xst", "^rows", "^no", named, "%s sge %one", end="%outer")}
  ^rows:
    {collapsed("%even", "%xsz, %xst", "%zero", "%outer", "%outer_")}
    {take("%outer_", rows=0, apart=1)}
    %alone = llvm.icmp "eq" %rows, %one : i64
    %stride = llvm.select %alone, %next, %apart : i1, i64
    {all_of("%b", "%even", "%stride sge %next")}
    {ask("%h", "a", "at")}
    {all_of("%good_rows", "%b", "%aread")}
    llvm.cond_br %good_rows, ^fill, ^no
  ^fill:
    %row_bytes = llvm.shl %stride, %xshift : i64
    %matters = llvm.select %alone, %zero, %row_bytes : i1, i64
    %low = llvm.or %aat, %matters : i64
    {fill("%call", {
        Word.ADDRESS: "%aat", Word.ROWS: "%rows", Word.WIDTH: "%next", Word.STRIDE: "%stride", Word.RANK: "%xnd",
        Word.SIZES: "%xsz: !llvm.ptr", Word.TYPE: "%xdt", Word.AXES: "%n", Word.DEVICE: "%xdev", Word.LOW: "%low",
    })}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""  # fmt: skip


def weight() -> str:
    """norm_weight(weight, call, device type, at): its scalar type if it is a dense weight of the call's rows on x's
    device, else -1; at = its address."""
    of_x = f"""
    %xi = llvm.add %i, %outer : i64
    {word("%w", "%xsz", "%xi")}"""
    return f"""
  llvm.func internal @norm_weight(%h: !llvm.ptr, %call: !llvm.ptr, %type: i64, %at_: !llvm.ptr) -> i64 {{
    {room_to_ask("w", "nd", "dt", "sz", "st", "dev", "kind")}
    {room_to_ask("a", "at")}
    {constants(zero=0, one=1, minus=-1)}
    {ask("%h", "w", "nd", "dt", "sz", "st", "dev", "kind")}
    {take("%call", rank=Word.RANK, axes=Word.AXES, xdev=Word.DEVICE)}
    {take("%call", "!llvm.ptr", xsz=Word.SIZES)}
    {element("w", "%wdt", door.FLOATS)}
    {all_of("%q", "%wread", "%wtyped", "%wnd eq %axes", "%wdev eq %xdev", "%wkind eq %type")}
    %outer = llvm.sub %rank, %axes : i64
    llvm.cond_br %q, ^axis(%wnd, %one : i64, i64), ^no
    {dense("%wsz", "%wst", "^address", "^no", of_x)}
  ^address:
    {ask("%h", "a", "at")}
    llvm.store %aat, %at_ : i64, !llvm.ptr
    llvm.cond_br %aread, ^yes, ^no
  ^yes:
    llvm.return %wdt : i64
  ^no:
    llvm.return %minus : i64
  }}"""


def statistics() -> str:
    """norm_rstd(rstd, call, device type, at): whether it is a dense f32 number for each row of the call on x's device;
    at = its address."""
    return f"""
  llvm.func internal @norm_rstd(%h: !llvm.ptr, %call: !llvm.ptr, %type: i64, %at_: !llvm.ptr) -> i1 {{
    {room_to_ask("r", "nd", "dt", "sz", "st", "dev", "kind")}
    {room_to_ask("a", "at")}
    {constants(zero=0, one=1, f32=door.F32)}
    %false = llvm.mlir.constant(false) : i1
    {ask("%h", "r", "nd", "dt", "sz", "st", "dev", "kind")}
    {take("%call", rows=Word.ROWS, xdev=Word.DEVICE)}
    {all_of("%q", "%rread", "%rdt eq %f32", "%rdev eq %xdev", "%rkind eq %type")}
    llvm.cond_br %q, ^axis(%rnd, %one : i64, i64), ^no
    {dense("%rsz", "%rst", "^address", "^no")}
  ^address:
    {ask("%h", "a", "at")}
    llvm.store %aat, %at_ : i64, !llvm.ptr
    {all_of("%sound", "%aread", "%next eq %rows")}
    llvm.return %sound : i1
  ^no:
    llvm.return %false : i1
  }}"""


def same() -> str:
    """norm_same(a, b): whether two calls have one size, type and device."""
    compared = (Word.ROWS, Word.WIDTH, Word.RANK, Word.TYPE, Word.DEVICE)
    words = "".join(take(f"%{call}", "i64", **{f"{call}{w.value}": int(w) for w in compared}) for call in "ab")
    return f"""
  llvm.func internal @norm_same(%a: !llvm.ptr, %b: !llvm.ptr) -> i1 {{
    {constants(zero=0, one=1)}
    %false = llvm.mlir.constant(false) : i1
    {words}
    {take("%a", "!llvm.ptr", asz=Word.SIZES)}
    {take("%b", "!llvm.ptr", bsz=Word.SIZES)}
    {all_of("%q", *(f"%a{w.value} eq %b{w.value}" for w in compared))}
    llvm.cond_br %q, ^axis(%a{Word.RANK.value} : i64), ^no
  ^axis(%above: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^yes
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%asz", "%i")}
    {word("%t", "%bsz", "%i")}
    %equal = llvm.icmp "eq" %s, %t : i64
    llvm.cond_br %equal, ^axis(%i : i64), ^no
  ^yes:
    %true = llvm.mlir.constant(true) : i1
    llvm.return %true : i1
  ^no:
    llvm.return %false : i1
  }}"""


def sound() -> str:
    """norm_sound(x, shape, weight or null): whether aten::rms_norm would find nothing wrong with its arguments and say
    nothing: the shape is that of x's last axes, the weight has it, and x's type."""
    return f"""
  llvm.func internal @norm_sound(%h: !llvm.ptr, %list: !llvm.ptr, %w: !llvm.ptr) -> i1 {{
    {room_to_ask("x", "nd", "dt", "sz")}
    {room_to_ask("w", "nd", "dt", "sz")}
    {room("n_", "item_")}
    {constants(zero=0, one=1)}
    %false = llvm.mlir.constant(false) : i1
    %true = llvm.mlir.constant(true) : i1
    %null = llvm.mlir.zero : !llvm.ptr
    {ask("%h", "x", "nd", "dt", "sz")}
    {call("%r5", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    %n = llvm.load %n_ : !llvm.ptr -> i64
    {all_of("%a", "%xread", "%n sge %one", "%n sle %xnd")}
    llvm.cond_br %a, ^weight, ^no
  ^weight:
    %outer = llvm.sub %xnd, %n : i64
    %weightless = llvm.icmp "eq" %w, %null : !llvm.ptr
    llvm.cond_br %weightless, ^axis(%n, %xsz, %outer : i64, !llvm.ptr, i64), ^ask
  ^ask:
    {ask("%w", "w", "nd", "dt", "sz")}
    {all_of("%q", "%wread", "%wnd eq %n", "%wdt eq %xdt")}
    llvm.cond_br %q, ^axis(%n, %wsz, %zero : i64, !llvm.ptr, i64), ^no
  ^axis(%above: i64, %sizes: !llvm.ptr, %skip: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^yes
  ^size:
    %i = llvm.sub %above, %one : i64
    %xi = llvm.add %i, %outer : i64
    %wi = llvm.add %i, %skip : i64
    {word("%xs", "%xsz", "%xi")}
    {word("%ws", "%sizes", "%wi")}
    {call("%r6", "torch_list_get_item", "%list: !llvm.ptr, %i: i64, %item_: !llvm.ptr")}
    %item = llvm.load %item_ : !llvm.ptr -> i64
    {all_of("%e", "%xs eq %item", "%ws eq %item")}
    llvm.cond_br %e, ^axis(%i, %sizes, %skip : i64, !llvm.ptr, i64), ^no
  ^yes:
    llvm.return %true : i1
  ^no:
    llvm.return %false : i1
  }}"""
