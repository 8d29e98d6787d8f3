"""Pieces of MLIR text for doors from PyTorch's dispatcher: plumbing of C calls in the LLVM dialect, no kernels.

A door is an x86 object whose functions the dispatcher calls in place of an operator's kernel, by the convention of
`aoti_torch_library_impl` (torch/csrc/inductor/aoti_torch/c/shim.h), PyTorch's C interface, which stays the same from
release to release: a call costs no Python and needs no GIL. What a door calls lies behind one table of addresses, laid
out by `OUTSIDE`, which the loader fills in (launch/torch_library.py). C++ exceptions pass through its frames.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..codeobject import CodeObject
from ..launch import torch_door as door
from ..launch.torch_door import Slot
from ..mlir import ExecutionEngine, PassManager, ir
from .x86 import LOWER

PERSONALITY = "attributes {personality = @__gxx_personality_v0}"  # of a function that exceptions pass through
TYPES_MOST, NO_TYPE = 16, 15  # ScalarType's numbers below it may be taken; what marks one that is not
_numbers = itertools.count()


def compile_door(name: str, text: str, entry: str) -> CodeObject:
    """A module's text as an object for any x86-64 processor. RuntimeError if LLVM makes no function of it."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        PassManager.parse(LOWER).run(module.operation)
        engine = ExecutionEngine(module, opt_level=2, enable_object_dump=True)
        for symbol, library in door.RUNTIME.items():
            address = ctypes.cast(getattr(ctypes.CDLL(library), symbol), ctypes.c_void_p)
            engine.raw_register_runtime(symbol, address)
        if not engine.raw_lookup(entry):  # compiles
            raise RuntimeError(f"LLVM made no function of the door for {name}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "door.o")
            engine.dump_to_object_file(str(file))
            binary = file.read_bytes()
    return CodeObject("x86", "", entry, (), (), workgroup_size=1, source={"door": name}, binary=binary)


def call(result: str, name: str, arguments: str = "", kind: str = "i32") -> str:
    """%result = name(arguments): through the table. arguments: "%a: type, ..."."""
    n = next(_numbers)
    pairs = [a.rsplit(":", 1) for a in arguments.split(",") if a]
    values, types = ", ".join(v.strip() for v, _ in pairs), ", ".join(t.strip() for _, t in pairs)
    to = f"{result} = " if result else ""
    return f"""
    {outside(f"%_f{n}", name)}
    {to}llvm.call %_f{n}({values}) : !llvm.ptr, ({types}) -> {kind if kind else "()"}"""


def outside(result: str, name: str) -> str:
    """%result = the address of what is called so in the table."""
    n = next(_numbers)
    return f"""
    %_t{n} = llvm.mlir.addressof @{door.TABLE} : !llvm.ptr
    %_g{n} = llvm.getelementptr %_t{n}[{door.OUTSIDE.index(name)}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    {result} = llvm.load %_g{n} : !llvm.ptr -> !llvm.ptr"""


def invoke(name: str, arguments: str, normal: str, unwind: str) -> str:
    """name(arguments), nothing returned; then to one of two blocks."""
    n = next(_numbers)
    pairs = [a.rsplit(":", 1) for a in arguments.split(",")]
    values, types = ", ".join(v.strip() for v, _ in pairs), ", ".join(t.strip() for _, t in pairs)
    return f"""
    {outside(f"%_f{n}", name)}
    llvm.invoke %_f{n}({values}) to {normal} unwind {unwind} : !llvm.ptr, ({types}) -> ()"""


def _of(index: int | str) -> str:
    """The type of an index that is a value and no number."""
    return ", i64" if str(index).startswith("%") else ""


def word(result: str, base: str, index: int | str, kind: str = "i64") -> str:
    """%result = the 8-byte word number `index` behind a pointer."""
    n = next(_numbers)
    return f"""
    %_p{n} = llvm.getelementptr {base}[{index}] : (!llvm.ptr{_of(index)}) -> !llvm.ptr, i64
    {result} = llvm.load %_p{n} : !llvm.ptr -> {kind}"""


def put(value: str, base: str, index: int | str, kind: str = "i64") -> str:
    n = next(_numbers)
    return f"""
    %_p{n} = llvm.getelementptr {base}[{index}] : (!llvm.ptr{_of(index)}) -> !llvm.ptr, i64
    llvm.store {value}, %_p{n} : {kind}, !llvm.ptr"""


def take(base: str, kind: str = "i64", **words: int) -> str:
    """%name = the word of that number behind a pointer, each."""
    return "".join(word(f"%{name}", base, int(index), kind) for name, index in words.items())


def fill(base: str, words: Mapping[int, str]) -> str:
    """Puts values where these numbers say; a value of another type than i64 says so: "%a: !llvm.ptr"."""
    text = ""
    for index, given in words.items():
        value, _, kind = given.partition(": ")
        text += put(value, base, int(index), kind or "i64")
    return text


# What may be asked of a tensor: the function, and whether the answer is 4 bytes or 8, or a pointer.
QUESTIONS = {
    "nd": ("aoti_torch_get_dim", "i64"),
    "dt": ("aoti_torch_get_dtype", "i32"),
    "sz": ("aoti_torch_get_sizes", "!llvm.ptr"),
    "st": ("aoti_torch_get_strides", "!llvm.ptr"),
    "dev": ("aoti_torch_get_device_index", "i32"),
    "kind": ("aoti_torch_get_device_type", "i32"),
    "at": ("aoti_torch_get_data_ptr", "i64"),
}


def room_to_ask(name: str, *what: str) -> str:
    """Where `ask` puts the answers: for a function's first block."""
    return room(*(f"{name}{w}_" for w in what))


def ask(handle: str, name: str, *what: str) -> str:
    """%NAMEnd, %NAMEsz, ... = the answers of a tensor; %NAMEread: whether it gave them all. what: of QUESTIONS."""
    text, failed, zero = "", [], f"%_z{next(_numbers)}"
    text += f"\n    {zero} = llvm.mlir.constant(0 : i64) : i64"
    for w in what:
        function, _ = QUESTIONS[w]
        text += f"\n    llvm.store {zero}, %{name}{w}_ : i64, !llvm.ptr"
        text += call(f"%_r{name}{w}", function, f"{handle}: !llvm.ptr, %{name}{w}_: !llvm.ptr")
        failed.append(f"%_r{name}{w}")
    text += fold("or", f"%_r{name}", *failed, kind="i32")
    text += f"\n    {zero}n = llvm.mlir.constant(0 : i32) : i32"
    text += f'\n    %{name}read = llvm.icmp "eq" %_r{name}, {zero}n : i32'
    for w in what:
        kind = QUESTIONS[w][1].replace("i32", "i64")
        text += f"\n    %{name}{w} = llvm.load %{name}{w}_ : !llvm.ptr -> {kind}"
    return text


def fold(what: str, result: str, *values: str, kind: str = "i1") -> str:
    """result = all of the values, "and"ed or "or"ed."""
    steps, text, before = [*(f"%_b{next(_numbers)}" for _ in values[2:]), result], "", values[0]
    for step, value in zip(steps, values[1:] or values[:1], strict=True):
        text += f"\n    {step} = llvm.{what} {before}, {value} : {kind}"
        before = step
    return text


def all_of(result: str, *conditions: str) -> str:
    """result = whether all of them hold: an i1 each, or a comparison of i64: "%a sle %b"."""
    text, flags = "", []
    for condition in conditions:
        flag = condition
        if " " in condition:
            (a, what, b), flag = condition.split(), f"%_c{next(_numbers)}"
            text += f'\n    {flag} = llvm.icmp "{what}" {a}, {b} : i64'
        flags.append(flag)
    return text + fold("and", result, *flags)


def element(name: str, scalar_type: str, types: Iterable[int]) -> str:
    """%NAMEtyped: whether a scalar type is one of these; %NAMEshift: log2 of its bytes. By a table of 4 bits a type."""
    known = sum((door.LOG2_BYTES[t] if t in set(types) else NO_TYPE) << 4 * t for t in range(TYPES_MOST))
    t = f"%{name}_t"
    return f"""
    {constants(**{f"{name}_known": known, f"{name}_most": TYPES_MOST, f"{name}_low": NO_TYPE, f"{name}_two": 2})}
    {t}0 = llvm.and {scalar_type}, %{name}_low : i64
    {t}1 = llvm.shl {t}0, %{name}_two : i64
    {t}2 = llvm.lshr %{name}_known, {t}1 : i64
    %{name}shift = llvm.and {t}2, %{name}_low : i64
    {all_of(f"%{name}typed", f"{scalar_type} ult %{name}_most", f"%{name}shift ne %{name}_low")}"""


def constants(**values: int) -> str:
    """%name = value, of 64 bits with a sign or without."""
    signed = {name: value - 2**64 if value >= 2**63 else value for name, value in values.items()}
    return "".join(f"\n    %{name} = llvm.mlir.constant({value} : i64) : i64" for name, value in signed.items())


def room(*names: str) -> str:
    """A word on the stack for each name."""
    one = f"%_one{next(_numbers)}"
    return f"\n    {one} = llvm.mlir.constant(1 : i64) : i64" + "".join(
        f"\n    %{name} = llvm.alloca {one} x i64 : (i64) -> !llvm.ptr" for name in names
    )


def module(name: str, *functions: str) -> str:
    """The door's module: the table, and these functions."""
    size = len(door.OUTSIDE)
    return f"""
module {{
  llvm.mlir.global external @{door.TABLE}() {{addr_space = 0 : i32, dso_local}} : !llvm.array<{size} x ptr> {{
    %0 = llvm.mlir.zero : !llvm.array<{size} x ptr>
    llvm.return %0 : !llvm.array<{size} x ptr>
  }}
  llvm.func @__gxx_personality_v0(...) -> i32
  llvm.mlir.global internal constant @where("{name}\\00") {{addr_space = 0 : i32}}
{chr(10).join(functions)}
}}
"""


def find() -> str:
    """find(width, k, code, rows, said): the words of who serves a call; null: ATen does. width, k, code: the slot's
    key. said: where a message is left that the call is to fail with, else null."""
    c0, c1, c2 = door.MULTIPLIERS
    return f"""
  llvm.func internal @find(%width: i64, %k: i64, %code: i64, %rows: i64, %said: !llvm.ptr) -> !llvm.ptr {{
    {constants(zero=0, one=1, m0=c0, m1=c1, m2=c2, down=door.HASH_SHIFT, probes=door.PROBES, words=door.SLOT_WORDS)}
    {constants(ours=door.OURS)}
    %null = llvm.mlir.zero : !llvm.ptr
    %h0 = llvm.mul %width, %m0 : i64
    %h1 = llvm.mul %k, %m1 : i64
    %h2 = llvm.mul %code, %m2 : i64
    %h3 = llvm.xor %h0, %h1 : i64
    %h4 = llvm.xor %h3, %h2 : i64
    %start = llvm.lshr %h4, %down : i64
    %table = llvm.mlir.addressof @{door.TABLE} : !llvm.ptr
    %g = llvm.getelementptr %table[{door.OUTSIDE.index("slots")}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %state_ = llvm.load %g : !llvm.ptr -> !llvm.ptr
    llvm.br ^again(%zero : i64)
  ^again(%asked: i64):
    %slots = llvm.load %state_ atomic acquire {{alignment = 8 : i64}} : !llvm.ptr -> !llvm.ptr
    {word("%mask", "%slots", 0)}
    llvm.br ^probe(%zero : i64)
  ^probe(%n: i64):
    %within = llvm.icmp "ult" %n, %probes : i64
    llvm.cond_br %within, ^look, ^aten
  ^look:
    %x0 = llvm.add %start, %n : i64
    %x1 = llvm.and %x0, %mask : i64
    %x2 = llvm.add %x1, %one : i64
    %x3 = llvm.mul %x2, %words : i64
    %slot = llvm.getelementptr %slots[%x3] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %state = llvm.load %slot atomic acquire {{alignment = 8 : i64}} : !llvm.ptr -> i64
    %empty = llvm.icmp "eq" %state, %zero : i64
    llvm.cond_br %empty, ^miss, ^compare
  ^compare:
    {word("%width_", "%slot", Slot.WIDTH.value)}
    {word("%k_", "%slot", Slot.K.value)}
    {word("%code_", "%slot", Slot.CODE.value)}
    %q0 = llvm.icmp "eq" %width_, %width : i64
    %q1 = llvm.icmp "eq" %k_, %k : i64
    %q2 = llvm.icmp "eq" %code_, %code : i64
    %q3 = llvm.and %q0, %q1 : i1
    %q = llvm.and %q3, %q2 : i1
    %n2 = llvm.add %n, %one : i64
    llvm.cond_br %q, ^found, ^probe(%n2 : i64)
  ^found:
    %mine = llvm.icmp "eq" %state, %ours : i64
    {word("%words_", "%slot", Slot.WORDS.value, "!llvm.ptr")}
    %answer = llvm.select %mine, %words_, %null : i1, !llvm.ptr
    llvm.return %answer : !llvm.ptr
  ^miss:
    %new = llvm.icmp "eq" %asked, %zero : i64
    llvm.cond_br %new, ^ask, ^aten
  ^ask:
    {call("%message", "resolve", "%width: i64, %k: i64, %code: i64, %rows: i64", "!llvm.ptr")}
    llvm.store %message, %said : !llvm.ptr, !llvm.ptr
    %silent = llvm.icmp "eq" %message, %null : !llvm.ptr
    llvm.cond_br %silent, ^again(%one : i64), ^aten
  ^aten:
    llvm.return %null : !llvm.ptr
  }}"""


def say(message: str, normal: str, unwind: str) -> str:
    """Throw a message."""
    n = next(_numbers)
    return f"""
    %_where{n} = llvm.mlir.addressof @where : !llvm.ptr
    %_never{n} = llvm.mlir.constant(0 : i8) : i8
    %_line{n} = llvm.mlir.constant(0 : i32) : i32
    {invoke(door.RAISE, f"%_never{n}: i8, %_where{n}: !llvm.ptr, %_where{n}: !llvm.ptr, %_line{n}: i32, "
             f"{message}: !llvm.ptr", normal, unwind)}"""  # fmt: skip


def served(key: str, ours: str, otherwise: str, unwind: str = "^unwind") -> str:
    """Looks a call up, by "%width, %k, %code, %rows": to block `ours` with its %slot, or to `otherwise`; a message that
    it is to fail with is thrown. Takes %null, and the word %said that holds it."""
    return f"""
    %slot = llvm.call @find({key}, %said) : (i64, i64, i64, i64, !llvm.ptr) -> !llvm.ptr
    %served = llvm.icmp "ne" %slot, %null : !llvm.ptr
    llvm.cond_br %served, {ours}, ^not_ours
  ^not_ours:
    %message = llvm.load %said : !llvm.ptr -> !llvm.ptr
    %fails = llvm.icmp "ne" %message, %null : !llvm.ptr
    llvm.cond_br %fails, ^fail, {otherwise}
  ^fail:
    {say("%message", otherwise, unwind)}"""


def fresh(name: str, layout: str, device: str, failed: str) -> str:
    """%NAME: a new tensor, and %NAME_at: its address (i64); goes on in a block of its own. layout: "%rank, %sizes,
    %strides, %scalar_type"; device: "%type, %number", the last three of 32 bits. Takes %fine and room for NAME_ and
    NAMEat_."""
    rank, sizes, strides, kind = layout.split(", ")
    arguments = f"{rank}: i64, {sizes}: !llvm.ptr, {strides}: !llvm.ptr, {kind}: i32"
    arguments += "".join(f", {d}: i32" for d in device.split(", "))
    return f"""
    {call(f"%{name}_r", "aoti_torch_empty_strided", f"{arguments}, %{name}_: !llvm.ptr")}
    %{name}_got = llvm.icmp "eq" %{name}_r, %fine : i32
    llvm.cond_br %{name}_got, ^{name}_made, {failed}
  ^{name}_made:
    %{name} = llvm.load %{name}_ : !llvm.ptr -> !llvm.ptr
    {call(f"%{name}_r2", "aoti_torch_get_data_ptr", f"%{name}: !llvm.ptr, %{name}at_: !llvm.ptr")}
    %{name}_at = llvm.load %{name}at_ : !llvm.ptr -> i64"""


def room_for_fresh(*names: str) -> str:
    """What `fresh` wants: for a function's first block."""
    return room(*(f"{name}{end}" for name in names for end in ("_", "at_")))


def dropped(*handles: str) -> str:
    """Gives tensors back."""
    return "".join(call(f"%_d{next(_numbers)}", "aoti_torch_delete_tensor_object", f"{h}: !llvm.ptr") for h in handles)


def boxed(name: str, *places: int) -> str:
    """%NAME0, %NAME1: handles of the tensors that C++ returned in these words of %both; std::tuple's last one is first.
    Takes %eight."""
    return "".join(
        call(f"%{name}{n}", "malloc", "%eight: i64", "!llvm.ptr")
        + word(f"%{name}_{n}", "%both", place)
        + put(f"%{name}_{n}", f"%{name}{n}", 0)
        for n, place in enumerate(places)
    )


def unwinding(released: str) -> str:
    """^unwind: what was held is released, and the exception goes on."""
    return f"""
  ^unwind:
    %exception = llvm.landingpad cleanup : !llvm.struct<(ptr, i32)>
    {released}
    llvm.resume %exception : !llvm.struct<(ptr, i32)>"""


def strings(**named: str) -> str:
    """Globals of a module: C strings, @NAME."""
    return "".join(
        f'\n  llvm.mlir.global internal constant @{name}("{text}\\00") {{addr_space = 0 : i32}}'
        for name, text in named.items()
    )


def pythons(operator: str) -> str:
    """^python: the operator of Python's that a string names takes over the stack. Strings @overload and @failed are
    what it is asked for with, and what is said if it fails. Takes %fine."""
    return f"""
  ^python:
    %op = llvm.mlir.addressof @{operator} : !llvm.ptr
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
    llvm.resume %exception2 : !llvm.struct<(ptr, i32)>"""
