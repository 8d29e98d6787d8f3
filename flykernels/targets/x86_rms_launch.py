"""How the doors for RMSNorm (x86_rms_door.py) run a kernel: on a GPU through its driver, on the CPU by a call.

    norm_run(slot, call, values, form, rows at, parts at, threads)      1 if it ran

values: the kernel's arguments as words of 8 bytes (templates/rms_norm/arguments.py), without workspace; the words at
`rows at` and `parts at` are rows and parts; the latter is filled in. form: on a GPU how many there are, on the CPU
which of HOST_FORMS they are.
"""

from __future__ import annotations

from ..launch.torch_door import RmsHostWords, RmsWords
from . import x86_gpu_launch as launch
from .x86_door import call, constants, fold, put, room, word
from .x86_rms_tensors import Word

VALUES_MOST = 12  # arguments of a kernel
BYTE = 0  # ScalarType's number of uint8
# Kernels on the CPU: (arguments, which of them is eps, of 32 bits): forward without and with a weight; backward without
# a weight, with it, and with its gradient.
HOST_FORMS = ((8, 3), (9, 4), (9, None), (10, None), (12, None))


def gpu(device_type: int) -> str:
    """The launch on torch's current stream of the call's device."""
    return f"""
  llvm.func internal @norm_run(%slot: !llvm.ptr, %call: !llvm.ptr, %values: !llvm.ptr, %count_: i64, %rows_at: i64,
                               %parts_at: i64, %threads_: i64) -> i1 {{
    {room(*launch.ROOM, "space_", "size_", "stride_", "space_at_")}
    {constants(zero=0, one=1, values_most=VALUES_MOST)}
    {launch.CONSTANTS}
    %byte = llvm.mlir.constant({BYTE} : i32) : i32
    %type = llvm.mlir.constant({device_type} : i32) : i32
    %places = llvm.alloca %values_most x i64 : (i64) -> !llvm.ptr
    {word("%rows", "%values", "%rows_at")}
    {word("%device", "%call", Word.DEVICE.value)}
    {word("%function", "%slot", RmsWords.FUNCTION.value, "!llvm.ptr")}
    {word("%threads", "%slot", RmsWords.WORKGROUP.value)}
    {word("%tile", "%slot", RmsWords.TILE.value)}
    {word("%most", "%slot", RmsWords.PARTS_MOST.value)}
    {word("%second", "%slot", RmsWords.SECOND.value, "!llvm.ptr")}
    {word("%threads2", "%slot", RmsWords.SECOND_WORKGROUP.value)}
    {word("%grid2", "%slot", RmsWords.SECOND_GRID.value)}
    {word("%third", "%slot", RmsWords.THIRD.value, "!llvm.ptr")}
    {word("%threads3", "%slot", RmsWords.THIRD_WORKGROUP.value)}
    {word("%grid3", "%slot", RmsWords.THIRD_GRID.value)}
    {word("%part_bytes", "%slot", RmsWords.PART_BYTES.value)}
    %up = llvm.add %rows, %tile : i64
    %up1 = llvm.sub %up, %one : i64
    %tiles = llvm.udiv %up1, %tile : i64
    %parts = llvm.intr.umin(%tiles, %most) : (i64, i64) -> i64
    {put("%parts", "%values", "%parts_at")}
    %device32 = llvm.trunc %device : i64 to i32
    {launch.on_device("%device32", "^space", "^no")}
  ^no:
    %false = llvm.mlir.constant(false) : i1
    llvm.return %false : i1
  ^space(%guard: !llvm.ptr):
    %plain = llvm.icmp "eq" %part_bytes, %zero : i64
    llvm.cond_br %plain, ^list(%null : !llvm.ptr), ^make
  ^make:
    %size = llvm.mul %part_bytes, %parts : i64
    llvm.store %size, %size_ : i64, !llvm.ptr
    llvm.store %one, %stride_ : i64, !llvm.ptr
    {
        call(
            "%r2",
            "aoti_torch_empty_strided",
            "%one: i64, %size_: !llvm.ptr, %stride_: !llvm.ptr, %byte: i32, "
            "%type: i32, %device32: i32, %space_: !llvm.ptr",
        )
    }
    %made = llvm.icmp "eq" %r2, %none : i32
    llvm.cond_br %made, ^made, ^leave(%single, %null : i32, !llvm.ptr)
  ^made:
    %space1 = llvm.load %space_ : !llvm.ptr -> !llvm.ptr
    {call("%r3", "aoti_torch_get_data_ptr", "%space1: !llvm.ptr, %space_at_: !llvm.ptr")}
    llvm.br ^list(%space1 : !llvm.ptr)
  ^list(%space: !llvm.ptr):
    llvm.br ^place(%zero, %count_ : i64, i64)
    {launch.place("%values", "^go")}
  ^go:
    {put("%space_at_", "%places", "%count_", "!llvm.ptr")}
    {launch.stream("%r4", "%device32")}
    %grid = llvm.trunc %parts : i64 to i32
    %threads32 = llvm.trunc %threads : i64 to i32
    {launch.launched("%launched1", "%function", "%grid", "%single", "%threads32")}
    {fold("or", "%status", "%r4", "%launched1", kind="i32")}
    %took = llvm.icmp "eq" %status, %none : i32
    %several = llvm.icmp "ne" %second, %null : !llvm.ptr
    %go_on = llvm.and %took, %several : i1
    llvm.cond_br %go_on, ^follow, ^leave(%status, %space : i32, !llvm.ptr)
  ^follow:
    %grid232 = llvm.trunc %grid2 : i64 to i32
    %threads232 = llvm.trunc %threads2 : i64 to i32
    %more3 = llvm.icmp "ne" %third, %null : !llvm.ptr
    %down2 = llvm.select %more3, %grid, %single : i1, i32
    {launch.launched("%launched2", "%second", "%grid232", "%down2", "%threads232")}
    %took2 = llvm.icmp "eq" %launched2, %none : i32
    %on = llvm.and %took2, %more3 : i1
    llvm.cond_br %on, ^last, ^leave(%launched2, %space : i32, !llvm.ptr)
  ^last:
    %grid332 = llvm.trunc %grid3 : i64 to i32
    %threads332 = llvm.trunc %threads3 : i64 to i32
    {launch.launched("%launched3", "%third", "%grid332", "%single", "%threads332")}
    llvm.br ^leave(%launched3, %space : i32, !llvm.ptr)
  ^leave(%said: i32, %held: !llvm.ptr):
    %empty = llvm.icmp "eq" %held, %null : !llvm.ptr
    llvm.cond_br %empty, ^unguard, ^drop
  ^drop:
    {call("%r5", "aoti_torch_delete_tensor_object", "%held: !llvm.ptr")}
    llvm.br ^unguard
  ^unguard:
    {launch.given_back("^done")}
  ^done:
    %fine = llvm.icmp "eq" %said, %none : i32
    llvm.return %fine : i1
  }}"""


def host() -> str:
    """The call of a kernel's C entry, with as many threads as torch has."""
    calls = "".join(_host_call(n, *form) for n, form in enumerate(HOST_FORMS))
    return f"""
  llvm.func internal @norm_call(%f: !llvm.ptr, %v: !llvm.ptr, %form: i64, %threads: i32) {{
    %null = llvm.mlir.zero : !llvm.ptr
    llvm.switch %form : i64, ^form0 [{", ".join(f"{n}: ^form{n}" for n in range(1, len(HOST_FORMS)))}]
    {calls}
  }}
  llvm.func internal @norm_run(%slot: !llvm.ptr, %call: !llvm.ptr, %values: !llvm.ptr, %form: i64, %rows_at: i64,
                               %parts_at: i64, %threads: i64) -> i1 {{
    {constants(zero=0, one=1, line=64, up=63, down=-64, last=VALUES_MOST - 1)}
    %null = llvm.mlir.zero : !llvm.ptr
    %false = llvm.mlir.constant(false) : i1
    %true = llvm.mlir.constant(true) : i1
    {word("%rows", "%values", "%rows_at")}
    {word("%width", "%call", Word.WIDTH.value)}
    {word("%kernel", "%slot", RmsHostWords.KERNEL.value, "!llvm.ptr")}
    {word("%work", "%slot", RmsHostWords.WORK.value)}
    {word("%second", "%slot", RmsHostWords.SECOND.value, "!llvm.ptr")}
    {word("%part_bytes", "%slot", RmsHostWords.PART_BYTES.value)}
    %elements = llvm.mul %rows, %width : i64
    %worth = llvm.udiv %elements, %work : i64
    %p0 = llvm.intr.umin(%worth, %threads) : (i64, i64) -> i64
    %p1 = llvm.intr.umin(%p0, %rows) : (i64, i64) -> i64
    %parts = llvm.intr.umax(%p1, %one) : (i64, i64) -> i64
    {put("%parts", "%values", "%parts_at")}
    %threads32 = llvm.trunc %threads : i64 to i32
    %plain = llvm.icmp "eq" %part_bytes, %zero : i64
    llvm.cond_br %plain, ^go(%null : !llvm.ptr), ^make
  ^make:
    %size = llvm.mul %part_bytes, %parts : i64
    %a = llvm.add %size, %up : i64
    %b = llvm.and %a, %down : i64
    {call("%space1", "aligned_alloc", "%line: i64, %b: i64", "!llvm.ptr")}
    %got = llvm.icmp "ne" %space1, %null : !llvm.ptr
    llvm.cond_br %got, ^go(%space1 : !llvm.ptr), ^no
  ^no:
    llvm.return %false : i1
  ^go(%space: !llvm.ptr):
    {put("%space", "%values", "%last", "!llvm.ptr")}
    llvm.call @norm_call(%kernel, %values, %form, %threads32) : (!llvm.ptr, !llvm.ptr, i64, i32) -> ()
    %alone = llvm.icmp "eq" %second, %null : !llvm.ptr
    llvm.cond_br %alone, ^done, ^follow
  ^follow:
    llvm.call @norm_call(%second, %values, %form, %threads32) : (!llvm.ptr, !llvm.ptr, i64, i32) -> ()
    llvm.br ^done
  ^done:
    {call("", "free", "%space: !llvm.ptr", "")}
    llvm.return %true : i1
  }}"""


def _host_call(n: int, words: int, eps: int | None) -> str:
    """^formN: calls %f with so many words, workspace the last of them where there are all."""
    text, arguments, types = f"\n  ^form{n}:", [], []
    for i in range(words):
        if i == eps:
            text += word(f"%w{n}_{i}", "%v", i) + f"\n    %a{n}_{i} = llvm.trunc %w{n}_{i} : i64 to i32"
            types.append("i32")
        else:
            text += word(f"%a{n}_{i}", "%v", i)
            types.append("i64")
        arguments.append(f"%a{n}_{i}")
    return (
        text
        + f"""
    llvm.call %f({", ".join(arguments)}, %null, %threads) : !llvm.ptr, ({", ".join(types)}, !llvm.ptr, i32) -> ()
    llvm.return"""
    )
