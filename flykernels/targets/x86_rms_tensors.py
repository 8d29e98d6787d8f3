"""What the doors for RMSNorm (x86_rms_door.py) ask of tensors: MLIR text of functions inside their object.

A *call* is 12 words that `norm_rows` writes of x; `Word` says what lies where.
"""

from __future__ import annotations

import enum

from ..launch import torch_door as door
from .x86_door import ask, call, constants, fold, is_float, put, room, room_to_ask, word


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
    return f"""
  llvm.func internal @norm_rows(%h: !llvm.ptr, %list: !llvm.ptr, %call: !llvm.ptr) -> i1 {{
    {room_to_ask("x", "nd", "dt", "sz", "st", "dev")}
    {room_to_ask("a", "at")}
    {room("n_", "item_")}
    {constants(zero=0, one=1, two=2, f32=door.F32, rank_most=door.DIMENSIONS_MOST)}
    {ask("%h", "x", "nd", "dt", "sz", "st", "dev")}
    {call("%r5", "torch_list_size", "%list: !llvm.ptr, %n_: !llvm.ptr")}
    llvm.cond_br %xread, ^type, ^no
  ^type:
    %n = llvm.load %n_ : !llvm.ptr -> i64
    {is_float("%typed", "%xdt")}
    %some = llvm.icmp "sge" %n, %one : i64
    %within = llvm.icmp "sle" %n, %xnd : i64
    %few = llvm.icmp "sle" %xnd, %rank_most : i64
    {fold("and", "%a", "%typed", "%some", "%within", "%few")}
    %outer = llvm.sub %xnd, %n : i64
    llvm.cond_br %a, ^inner(%xnd, %one : i64, i64), ^no
  ^inner(%above: i64, %width: i64):
    %more = llvm.icmp "sgt" %above, %outer : i64
    llvm.cond_br %more, ^row_axis, ^axis(%outer, %one, %width, %zero : i64, i64, i64, i64)
  ^row_axis:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%xsz", "%i")}
    {word("%t", "%xst", "%i")}
    %j = llvm.sub %i, %outer : i64
    {call("%r6", "torch_list_get_item", "%list: !llvm.ptr, %j: i64, %item_: !llvm.ptr")}
    %item = llvm.load %item_ : !llvm.ptr -> i64
    %named = llvm.icmp "eq" %item, %s : i64
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %width : i64
    %lies = llvm.or %single, %follows : i1
    %any = llvm.icmp "sge" %s, %one : i64
    {fold("and", "%b", "%named", "%lies", "%any")}
    %width2 = llvm.mul %width, %s : i64
    llvm.cond_br %b, ^inner(%i, %width2 : i64, i64), ^no
  ^axis(%above2: i64, %rows: i64, %stride: i64, %next: i64):
    %more2 = llvm.icmp "sgt" %above2, %zero : i64
    llvm.cond_br %more2, ^size, ^all
  ^size:
    %i2 = llvm.sub %above2, %one : i64
    {word("%s2", "%xsz", "%i2")}
    {word("%t2", "%xst", "%i2")}
    %single2 = llvm.icmp "eq" %s2, %one : i64
    llvm.cond_br %single2, ^axis(%i2, %rows, %stride, %next : i64, i64, i64, i64), ^several
  ^several:
    %first = llvm.icmp "eq" %rows, %one : i64
    %follows2 = llvm.icmp "eq" %t2, %next : i64
    %fits = llvm.or %first, %follows2 : i1
    %apart = llvm.icmp "sge" %t2, %width : i64
    %any2 = llvm.icmp "sgt" %s2, %zero : i64
    {fold("and", "%c", "%fits", "%apart", "%any2")}
    %stride2 = llvm.select %first, %t2, %stride : i1, i64
    %next2 = llvm.mul %t2, %s2 : i64
    %rows2 = llvm.mul %rows, %s2 : i64
    llvm.cond_br %c, ^axis(%i2, %rows2, %stride2, %next2 : i64, i64, i64, i64), ^no
  ^all:
    {ask("%h", "a", "at")}
    llvm.cond_br %aread, ^fill, ^no
  ^fill:
    %is32 = llvm.icmp "eq" %xdt, %f32 : i64
    %shift = llvm.select %is32, %two, %one : i1, i64
    %row_bytes = llvm.shl %stride, %shift : i64
    %alone = llvm.icmp "eq" %rows, %one : i64
    %matters = llvm.select %alone, %zero, %row_bytes : i1, i64
    %low = llvm.or %aat, %matters : i64
    {put("%aat", "%call", Word.ADDRESS.value)}
    {put("%rows", "%call", Word.ROWS.value)}
    {put("%width", "%call", Word.WIDTH.value)}
    {put("%stride", "%call", Word.STRIDE.value)}
    {put("%xnd", "%call", Word.RANK.value)}
    {put("%xsz", "%call", Word.SIZES.value, "!llvm.ptr")}
    {put("%xdt", "%call", Word.TYPE.value)}
    {put("%n", "%call", Word.AXES.value)}
    {put("%xdev", "%call", Word.DEVICE.value)}
    {put("%low", "%call", Word.LOW.value)}
    %yes = llvm.mlir.constant(true) : i1
    llvm.return %yes : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""


def weight() -> str:
    """norm_weight(weight, call, device type, at): its scalar type if it is a dense weight of the call's rows on x's
    device, else -1; at = its address."""
    return f"""
  llvm.func internal @norm_weight(%h: !llvm.ptr, %call: !llvm.ptr, %type: i64, %at_: !llvm.ptr) -> i64 {{
    {room_to_ask("w", "nd", "dt", "sz", "st", "dev", "kind")}
    {room_to_ask("a", "at")}
    {constants(zero=0, one=1, minus=-1)}
    {ask("%h", "w", "nd", "dt", "sz", "st", "dev", "kind")}
    {word("%rank", "%call", Word.RANK.value)}
    {word("%xsz", "%call", Word.SIZES.value, "!llvm.ptr")}
    {word("%axes", "%call", Word.AXES.value)}
    {word("%xdev", "%call", Word.DEVICE.value)}
    {is_float("%typed", "%wdt")}
    %q0 = llvm.icmp "eq" %wnd, %axes : i64
    %q1 = llvm.icmp "eq" %wdev, %xdev : i64
    %q2 = llvm.icmp "eq" %wkind, %type : i64
    {fold("and", "%q", "%wread", "%typed", "%q0", "%q1", "%q2")}
    %outer = llvm.sub %rank, %axes : i64
    llvm.cond_br %q, ^axis(%wnd, %one : i64, i64), ^no
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^address
  ^size:
    %i = llvm.sub %above, %one : i64
    %xi = llvm.add %i, %outer : i64
    {word("%s", "%wsz", "%i")}
    {word("%t", "%wst", "%i")}
    {word("%xs", "%xsz", "%xi")}
    %same = llvm.icmp "eq" %s, %xs : i64
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %lies = llvm.or %single, %follows : i1
    %good = llvm.and %same, %lies : i1
    %next2 = llvm.mul %next, %s : i64
    llvm.cond_br %good, ^axis(%i, %next2 : i64, i64), ^no
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
    {word("%rows", "%call", Word.ROWS.value)}
    {word("%xdev", "%call", Word.DEVICE.value)}
    %q0 = llvm.icmp "eq" %rdt, %f32 : i64
    %q1 = llvm.icmp "eq" %rdev, %xdev : i64
    %q2 = llvm.icmp "eq" %rkind, %type : i64
    {fold("and", "%q", "%rread", "%q0", "%q1", "%q2")}
    llvm.cond_br %q, ^axis(%rnd, %one : i64, i64), ^no
  ^axis(%above: i64, %next: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^size, ^address
  ^size:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%rsz", "%i")}
    {word("%t", "%rst", "%i")}
    %single = llvm.icmp "eq" %s, %one : i64
    %follows = llvm.icmp "eq" %t, %next : i64
    %lies = llvm.or %single, %follows : i1
    %next2 = llvm.mul %next, %s : i64
    llvm.cond_br %lies, ^axis(%i, %next2 : i64, i64), ^no
  ^address:
    {ask("%h", "a", "at")}
    llvm.store %aat, %at_ : i64, !llvm.ptr
    %all = llvm.icmp "eq" %next, %rows : i64
    {fold("and", "%good", "%aread", "%all")}
    llvm.return %good : i1
  ^no:
    llvm.return %false : i1
  }}"""


def same() -> str:
    """norm_same(a, b): whether two calls have one size, type and device."""
    compared = (Word.ROWS, Word.WIDTH, Word.RANK, Word.TYPE, Word.DEVICE)
    words = "".join(
        word(f"%a{w.value}", "%a", w.value)
        + word(f"%b{w.value}", "%b", w.value)
        + f'\n    %q{w.value} = llvm.icmp "eq" %a{w.value}, %b{w.value} : i64'
        for w in compared
    )
    return f"""
  llvm.func internal @norm_same(%a: !llvm.ptr, %b: !llvm.ptr) -> i1 {{
    {constants(zero=0, one=1)}
    %false = llvm.mlir.constant(false) : i1
    {words}
    {word("%asz", "%a", Word.SIZES.value, "!llvm.ptr")}
    {word("%bsz", "%b", Word.SIZES.value, "!llvm.ptr")}
    {fold("and", "%q", *(f"%q{w.value}" for w in compared))}
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
    %some = llvm.icmp "sge" %n, %one : i64
    %within = llvm.icmp "sle" %n, %xnd : i64
    {fold("and", "%a", "%xread", "%some", "%within")}
    llvm.cond_br %a, ^weight, ^no
  ^weight:
    %outer = llvm.sub %xnd, %n : i64
    %weightless = llvm.icmp "eq" %w, %null : !llvm.ptr
    llvm.cond_br %weightless, ^axis(%n, %xsz, %outer : i64, !llvm.ptr, i64), ^ask
  ^ask:
    {ask("%w", "w", "nd", "dt", "sz")}
    %q0 = llvm.icmp "eq" %wnd, %n : i64
    %q1 = llvm.icmp "eq" %wdt, %xdt : i64
    {fold("and", "%q", "%wread", "%q0", "%q1")}
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
    %e0 = llvm.icmp "eq" %xs, %item : i64
    %e1 = llvm.icmp "eq" %ws, %item : i64
    %e = llvm.and %e0, %e1 : i1
    llvm.cond_br %e, ^axis(%i, %sizes, %skip : i64, !llvm.ptr, i64), ^no
  ^yes:
    llvm.return %true : i1
  ^no:
    llvm.return %false : i1
  }}"""
