"""How doors launch kernels through a GPU's driver, on torch's current stream of the call's device: pieces of MLIR text,
each of which a function has once. The function has `ROOM`, `CONSTANTS` and %places, an array of words."""

from __future__ import annotations

from ..launch import torch_door as door
from .x86_door import call, put

ROOM = ("stream_", "here_", "guard_")
CONSTANTS = """
    %null = llvm.mlir.zero : !llvm.ptr
    %none = llvm.mlir.constant(0 : i32) : i32
    %single = llvm.mlir.constant(1 : i32) : i32"""


def on_device(device: str, then: str, failed: str) -> str:
    """To block `then`, with the guard that `given_back` takes, where the device (i32) is the current one; or to
    `failed`.."""
    return f"""
    llvm.store %none, %here_ : i32, !llvm.ptr
    {call("%found_here", door.CURRENT, "%here_: !llvm.ptr")}
    %here = llvm.load %here_ : !llvm.ptr -> i32
    %at_home = llvm.icmp "eq" %here, {device} : i32
    llvm.cond_br %at_home, {then}(%null : !llvm.ptr), ^away
  ^away:
    {call("%made_guard", "aoti_torch_create_device_guard", f"{device}: i32, %guard_: !llvm.ptr")}
    %guarded = llvm.icmp "eq" %made_guard, %none : i32
    %guard1 = llvm.load %guard_ : !llvm.ptr -> !llvm.ptr
    llvm.cond_br %guarded, {then}(%guard1 : !llvm.ptr), {failed}"""


def given_back(then: str) -> str:
    """Gives back the block's %guard, if it is one; to block `then`."""
    return f"""
    %free = llvm.icmp "eq" %guard, %null : !llvm.ptr
    llvm.cond_br %free, {then}, ^leave_guard
  ^leave_guard:
    {call("%left_guard", "aoti_torch_delete_device_guard", "%guard: !llvm.ptr")}
    llvm.br {then}"""


def place(words: str, then: str) -> str:
    """Block ^place(i, count): puts the addresses of so many words, from number i = %zero on, into %places, as the
    driver wants arguments; then to block `then`. %one is 1."""
    return f"""
  ^place(%i: i64, %count: i64):
    %more = llvm.icmp "ult" %i, %count : i64
    llvm.cond_br %more, ^value, {then}
  ^value:
    %value = llvm.getelementptr {words}[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    {put("%value", "%places", "%i", "!llvm.ptr")}
    %i2 = llvm.add %i, %one : i64
    llvm.br ^place(%i2, %count : i64, i64)"""


def stream(result: str, device: str) -> str:
    """%stream = torch's current one of the device (i32); result: 0 if there is one."""
    return f"""
    {call(result, door.STREAM, f"{device}: i32, %stream_: !llvm.ptr")}
    %stream = llvm.load %stream_ : !llvm.ptr -> !llvm.ptr"""


def launched(result: str, function: str, grid: str, down: str, threads: str, shared: str = "%none") -> str:
    """result = the driver's answer (0: launched): `grid` x `down` workgroups, all i32, with %places for arguments."""
    return call(
        result, "launch",
        f"{function}: !llvm.ptr, {grid}: i32, {down}: i32, %single: i32, {threads}: i32, %single: i32, %single: i32, "
        f"{shared}: i32, %stream: !llvm.ptr, %places: !llvm.ptr, %null: !llvm.ptr",
    )  # fmt: skip
