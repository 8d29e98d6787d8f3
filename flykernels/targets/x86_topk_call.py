"""How the operands of a top-k lie: what the door (x86_topk_door.py) asks of tensors before it looks a call up."""

from __future__ import annotations

import enum

from ..launch import torch_door as door
from .x86_door import (
    all_of,
    ask,
    call,
    constants,
    dropped,
    element,
    fill,
    fresh,
    put,
    room,
    room_for_fresh,
    room_to_ask,
    take,
    word,
)
from .x86_door_axes import collapsed, lay_out
from .x86_door_axes import dense as dense_axes

VECTOR = 16  # bytes: rows at multiples of it are read with the widest loads


class Word(enum.IntEnum):
    """What `rows` tells of a call, in words of 8 bytes."""

    ADDRESS = 0
    ROWS = 1
    WIDTH = 2
    STRIDE = 3  # elements from one row (of the outer axes) to the next
    CODE = 4  # as `torch_door.code_of` packs it
    RANK = 5
    SIZES = 6  # address
    TYPE = 7  # ScalarType's number
    DIMENSION = 8
    INNER = 9  # rows of the inner axes; or, of rows at two distances, the last of the outer axes
    ALONG = 10  # stride along the row
    INNER_STRIDE = 11
    SPAN = 12  # elements from x's first to its last
    SHIFT = 13  # log2 of an element's bytes
    OUT_ALONG = 14  # strides of dense results
    OUT_INNER = 15
    UNEVEN = 16  # 1: rows lie at more than two distances, and all the above speaks of the dense copy to be made


class Answer(enum.IntEnum):
    """What `rows` returns; but for ATENS call is filled in."""

    ATENS = 0
    KERNELS = 1  # may serve it
    NOTHING = 2  # is to be selected


def rows(gpu: int | None = None) -> str:
    """rows(handle, k, dim, largest, call): an Answer.

    gpu: a device type by its number; there kernels take fewer types, and nothing is copied. None: the CPU."""
    types = door.LOG2_BYTES if gpu is None else door.FLOATS
    asked = ["nd", "dt", "sz", "st", *(["dev", "kind"] if gpu is not None else [])]
    here = ["%xkind eq %kind"] if gpu is not None else []
    at_once = """%wants = llvm.icmp "ne" %k, %zero : i64
    llvm.cond_br %wants, ^asked, ^no
  ^asked:"""  # two empty results cost a GPU's door more than ATen, which needs no kernel for them either
    return f"""
  llvm.func internal @rows(%h: !llvm.ptr, %k: i64, %dim: i64, %largest: i64, %call: !llvm.ptr) -> i64 {{
    {room_to_ask("x", *asked)}
    {room_to_ask("a", "at")}
    {room("threads_")}
    {constants(zero=0, one=1, three=3, sixtyfour=64, low=VECTOR - 1, kind=gpu or 0)}
    {constants(most=door.ELEMENTS_MOST, rank_most=door.DIMENSIONS_MOST)}
    %outer_ = llvm.alloca %three x i64 : (i64) -> !llvm.ptr
    %inner_ = llvm.alloca %three x i64 : (i64) -> !llvm.ptr
    %front_ = llvm.alloca %three x i64 : (i64) -> !llvm.ptr
    {at_once if gpu is not None else ""}
    {ask("%h", "x", *asked)}
    {element("x", "%xdt", types)}
    %back = llvm.icmp "slt" %dim, %zero : i64
    %wrapped = llvm.add %dim, %xnd : i64
    %d = llvm.select %back, %wrapped, %dim : i1, i64
    {all_of("%a", "%xread", "%xtyped", "%d sge %zero", "%d slt %xnd", "%xnd sle %rank_most", *here)}
    llvm.cond_br %a, ^width, ^no
  ^width:
    {word("%width", "%xsz", "%d")}
    {word("%along_", "%xst", "%d")}
    %lone = llvm.icmp "eq" %width, %one : i64
    %along_x = llvm.select %lone, %one, %along_ : i1, i64
    %width_or_1 = llvm.intr.umax(%width, %one) : (i64, i64) -> i64
    %behind = llvm.add %d, %one : i64
    {collapsed("%even0", "%xsz, %xst", "%zero", "%d", "%outer_")}
    {collapsed("%even1", "%xsz, %xst", "%behind", "%xnd", "%inner_")}
    llvm.br ^size(%xnd, %one, %one : i64, i64, i64)
  ^size(%above: i64, %count: i64, %behind_d: i64):
    %more = llvm.icmp "sgt" %above, %zero : i64
    llvm.cond_br %more, ^multiply, ^counted
  ^multiply:
    %i = llvm.sub %above, %one : i64
    {word("%s", "%xsz", "%i")}
    %count2 = llvm.mul %count, %s : i64
    %is_behind = llvm.icmp "sgt" %i, %d : i64
    %behind_d2 = llvm.select %is_behind, %count2, %behind_d : i1, i64
    llvm.br ^size(%i, %count2, %behind_d2 : i64, i64, i64)
  ^counted:
    {all_of("%b", "%k sge %zero", "%k sle %width", "%count ule %most")}
    llvm.cond_br %b, ^some, ^no
  ^some:
    %anything = llvm.mul %count, %k : i64
    %any = llvm.icmp "ne" %anything, %zero : i64
    %even = llvm.and %even0, %even1 : i1
    %rows = llvm.udiv %count, %width_or_1 : i64
    llvm.cond_br %any, ^lies, ^describe(%zero, %one, %zero, %one, %zero, %one, %zero, %zero
        : i64, i64, i64, i64, i64, i64, i64, i64)
  ^lies:
    {ask("%h", "a", "at")}
    {take("%outer_", in_front=0, front_stride=1)}
    {take("%inner_", behind_=0, behind_stride=1)}
    %dense_front = llvm.udiv %rows, %behind_d : i64
    %dense_stride = llvm.mul %width, %behind_d : i64
    llvm.cond_br %even, ^describe(%aat, %in_front, %front_stride, %behind_, %behind_stride, %along_x, %zero, %zero
        : i64, i64, i64, i64, i64, i64, i64, i64),
      {"^uneven" if gpu is None else "^no"}
    {_at_two_distances() if gpu is None else ""}
  ^describe(%address: i64, %outer_rows: i64, %outer_stride: i64, %inner_rows: i64, %inner_stride: i64, %along: i64,
            %two: i64, %uneven: i64):
    %is_two = llvm.icmp "ne" %two, %zero : i64
    %out_along = llvm.select %is_two, %one, %inner_rows : i1, i64
    %out_inner = llvm.select %is_two, %k, %one : i1, i64
    {_distances(gpu is not None)}
    {_code(gpu is not None)}
    {fill("%call", {
        Word.ADDRESS: "%address", Word.ROWS: "%rows", Word.WIDTH: "%width", Word.STRIDE: "%stride", Word.CODE: "%code",
        Word.RANK: "%xnd", Word.SIZES: "%xsz: !llvm.ptr", Word.TYPE: "%xdt", Word.DIMENSION: "%d",
        Word.INNER: "%inner_rows", Word.ALONG: "%along", Word.INNER_STRIDE: "%inner_stride", Word.SPAN: "%span",
        Word.SHIFT: "%xshift", Word.OUT_ALONG: "%out_along", Word.OUT_INNER: "%out_inner", Word.UNEVEN: "%uneven",
    })}
    {constants(kernels=Answer.KERNELS, nothing=Answer.NOTHING)}
    %answer = llvm.select %any, %kernels, %nothing : i1, i64
    llvm.return %answer : i64
  ^no:
    {constants(atens=Answer.ATENS)}
    llvm.return %atens : i64
  }}"""  # fmt: skip


def _at_two_distances() -> str:
    """^uneven: rows of neighbours in two groups of axes, each evenly spaced; of others a dense copy is described."""
    return f"""
  ^uneven:
    {take("%outer_", group=2)}
    {collapsed("%even2", "%xsz, %xst", "%zero", "%group", "%front_")}
    {take("%front_", groups=0, groups_stride=1)}
    {all_of("%are_two", "%even2", "%behind_d eq %one")}
    llvm.cond_br %are_two,
      ^describe(%aat, %groups, %groups_stride, %in_front, %front_stride, %along_x, %one, %zero
        : i64, i64, i64, i64, i64, i64, i64, i64),
      ^describe(%zero, %dense_front, %dense_stride, %behind_d, %one, %behind_d, %zero, %one
        : i64, i64, i64, i64, i64, i64, i64, i64)"""


def _distances(gpu: bool) -> str:
    """%stride; %anywhere: whether a row's elements lie apart; %misaligned; %span. On a GPU a row that is shorter than a
    vector counts as misaligned: it is not read in vectors."""
    short = """
    %vector = llvm.add %low, %one : i64
    %width_bytes = llvm.shl %width, %xshift : i64
    %is_short = llvm.icmp "ult" %width_bytes, %vector : i64
    %narrow = llvm.zext %is_short : i1 to i64
    %uneven_row = llvm.or %odd_row, %narrow : i64"""
    return f"""
    %one_row = llvm.icmp "eq" %outer_rows, %one : i64
    %stride = llvm.select %one_row, %width, %outer_stride : i1, i64
    {all_of("%last", "%along eq %one", "%inner_rows eq %one")}
    %anywhere = llvm.select %last, %zero, %one : i1, i64
    %row_bytes = llvm.shl %stride, %xshift : i64
    %both = llvm.or %address, %row_bytes : i64
    %odd = llvm.and %both, %low : i64
    %is_odd = llvm.icmp "ne" %odd, %zero : i64
    %odd_row = llvm.zext %is_odd : i1 to i64
    {short if gpu else "%uneven_row = llvm.or %odd_row, %zero : i64"}
    %misaligned = llvm.or %uneven_row, %anywhere : i64
    %n0 = llvm.sub %outer_rows, %one : i64
    %n1 = llvm.sub %inner_rows, %one : i64
    %n2 = llvm.sub %width, %one : i64
    %s0 = llvm.mul %n0, %outer_stride : i64
    %s1 = llvm.mul %n1, %inner_stride : i64
    %s2 = llvm.mul %n2, %along : i64
    %s3 = llvm.add %s0, %s1 : i64
    %s4 = llvm.add %s2, %one : i64
    %span = llvm.add %s3, %s4 : i64"""


def _code(gpu: bool) -> str:
    """%code, as `torch_door.code_of` packs it; on a GPU the device's number is in the place of threads."""
    threads = f"""
    llvm.store %zero, %threads_ : i64, !llvm.ptr
    {call("%asked", "torch_get_num_threads", "%threads_: !llvm.ptr")}
    %threads = llvm.load %threads_ : !llvm.ptr -> i64"""
    parts = {
        "largest": door.LARGEST_BIT, "misaligned": door.MISALIGNED_BIT, "anywhere": door.ANY_BIT,
        "bucket": door.ROWS_SHIFT, "threads": door.THREADS_SHIFT,
    }  # fmt: skip
    shifted = "".join(
        constants(**{f"{part}_at": at}) + f"\n    %{part}_up = llvm.shl %{part}, %{part}_at : i64"
        for part, at in parts.items()
    )
    ups = "".join(
        f"\n    %code{n} = llvm.or {f'%code{n - 1}' if n else '%xdt'}, %{part}_up : i64"
        for n, part in enumerate(list(parts)[:-1])
    )
    return f"""
    %before = llvm.sub %rows, %one : i64
    %zeros = "llvm.intr.ctlz"(%before) <{{is_zero_poison = false}}> : (i64) -> i64
    %bucket = llvm.sub %sixtyfour, %zeros : i64
    {"%threads = llvm.or %xdev, %zero : i64" if gpu else threads}
    {shifted}
    {ups}
    %code = llvm.or %code{len(parts) - 2}, %threads_up : i64"""


def copied() -> str:
    """copied(handle, call, at): 1 if a dense copy of x was made, with the call's address now its own; at = its
    handle."""
    return f"""
  llvm.func internal @copied(%h: !llvm.ptr, %call: !llvm.ptr, %at: !llvm.ptr) -> i1 {{
    {constants(zero=0, one=1, rank_most=door.DIMENSIONS_MOST)}
    {room_for_fresh("x")}
    %st = llvm.alloca %rank_most x i64 : (i64) -> !llvm.ptr
    %fine = llvm.mlir.constant(0 : i32) : i32
    %cpu = llvm.mlir.constant({door.CPU} : i32) : i32
    {take("%call", nd=Word.RANK, dt=Word.TYPE)}
    {take("%call", "!llvm.ptr", sz=Word.SIZES)}
    {lay_out("%nd", "%sz", "^make", [("%s", "", "%st")])}
  ^make:
    %dt32 = llvm.trunc %dt : i64 to i32
    {fresh("x", "%nd, %sz, %st, %dt32", "%cpu, %cpu", "^no")}
    {put("%x", "%at", 0, "!llvm.ptr")}
    {fill("%call", {Word.ADDRESS: "%x_at"})}
    {call("%r", "aoti_torch_copy_", "%x: !llvm.ptr, %h: !llvm.ptr, %fine: i32")}
    %went = llvm.icmp "eq" %r, %fine : i32
    llvm.return %went : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}
  llvm.func internal @give_back(%at: !llvm.ptr) {{
    %null = llvm.mlir.zero : !llvm.ptr
    {take("%at", "!llvm.ptr", held=0)}
    %none = llvm.icmp "eq" %held, %null : !llvm.ptr
    llvm.cond_br %none, ^done, ^drop
  ^drop:
    {dropped("%held")}
    {put("%null", "%at", 0, "!llvm.ptr")}
    llvm.br ^done
  ^done:
    llvm.return
  }}"""


def dense(gpu: int | None = None) -> str:
    """dense(handle, call, k, scalar type, log2 of an element's bytes, at): 1 if the tensor is a dense result of the
    call on x's device, apart from x in memory; at = {first byte, byte after the last}."""
    asked = ["nd", "dt", "sz", "st", "kind", *(["dev"] if gpu is not None else [])]
    here = ["%rdev eq %number"] if gpu is not None else []
    wanted = f"""
    {word("%outer", "%wanted", "%i")}
    %chosen = llvm.icmp "eq" %i, %dim : i64
    %w = llvm.select %chosen, %k, %outer : i1, i64"""
    return f"""
  llvm.func internal @dense(%h: !llvm.ptr, %call: !llvm.ptr, %k: i64, %type: i64, %shift: i64, %at: !llvm.ptr) -> i1 {{
    {room_to_ask("r", *asked)}
    {constants(zero=0, one=1, type_=door.CPU if gpu is None else gpu, threads_shift=door.THREADS_SHIFT)}
    {take("%call", code=Word.CODE)}
    %number = llvm.lshr %code, %threads_shift : i64
    {take("%call", x=Word.ADDRESS, dim=Word.DIMENSION, rank=Word.RANK, span=Word.SPAN, xshift=Word.SHIFT)}
    {take("%call", "!llvm.ptr", wanted=Word.SIZES)}
    {ask("%h", "r", *asked)}
    {all_of("%q", "%rread", "%rnd eq %rank", "%rdt eq %type", "%rkind eq %type_", *here)}
    llvm.cond_br %q, ^axis(%rnd, %one : i64, i64), ^no
    {dense_axes("%rsz", "%rst", "^apart", "^no", wanted)}
  ^apart:
    {call("%r5", "aoti_torch_get_data_ptr", "%h: !llvm.ptr, %at: !llvm.ptr")}
    {take("%at", first=0)}
    %bytes = llvm.shl %next, %shift : i64
    %end = llvm.add %first, %bytes : i64
    {fill("%at", {1: "%end"})}
    %span_bytes = llvm.shl %span, %xshift : i64
    %x_end = llvm.add %x, %span_bytes : i64
    %left = llvm.icmp "ule" %end, %x : i64
    %right = llvm.icmp "uge" %first, %x_end : i64
    %free = llvm.or %left, %right : i1
    llvm.return %free : i1
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  }}"""
