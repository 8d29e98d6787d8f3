"""The CPU: a workgroup is one thread of one core, a fragment piece a wide vector, a launch a loop over workgroups.

What the object file's functions are called with, and what they need from outside: `x86_entry.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import MappingProxyType

from .. import cpu
from ..codeobject import Argument, CodeObject, Extent
from ..dtypes import i32
from ..lang.memory import Global, advance
from ..lang.values import Value, constant, mlir_type
from ..mlir import ExecutionEngine, PassManager, ir, llvm, scf
from .gpu import keep_loops
from . import x86_lanes
from .x86_entry import Byte, add_entries, add_table, function
from .x86_math import expand

LOWER = (
    "builtin.module(canonicalize,cse,arith-expand{include-bf16=true},convert-scf-to-cf,convert-math-to-llvm,"
    "convert-to-llvm,reconcile-unrealized-casts,canonicalize,cse)"
)
CACHE_LINE = 64  # bytes
# Bytes of a vector register, and how many a loop may fill. AVX-512 has 32: with 31 in use LLVM's allocator spills.
REGISTERS = {"x86-64-v3": (32, 16), "x86-64-v4": (64, 30)}


class X86:
    """One CPU target.

    level             "x86-64-v3" (AVX2, FMA, F16C) or "x86-64-v4" (AVX-512); default: the best this machine has
    vector_bytes      of one vector register
    vector_registers  how many a loop may fill
    caches            data cache sizes, for blocking
    features          comma-separated, sorted: what a machine needs to run the code
    """

    name, lanes = "x86", 1
    exact_roots = True  # LLVM's estimate with a Newton step (RSQRTPS) makes NaN of 0 and infinity
    held_bytes = 512  # 16 registers: what a row may take to be held
    scopes = MappingProxyType({"workgroup": "", "device": ""})  # LLVM's name of all threads there are

    def __init__(self, level: str | None = None, caches: cpu.Caches | None = None):
        self.level, self.caches = level or cpu.level(), caches or cpu.caches()
        self.vector_bytes, self.vector_registers = REGISTERS[self.level]
        self.features = ",".join(cpu.needed(self.level))

    # -- what the language asks for
    def pointer_type(self):
        return ir.Type.parse("!llvm.ptr")

    def open_module(self):
        module = ir.Module.create()
        add_table(module)
        return module

    def begin(self, k, types, is_memory):
        """share(arguments..., workspace, first, end): runs the workgroups first <= id < end, one after the other."""
        k.of_target.types, k.private_bytes = types, 0
        block = function(k, f"{k.name}_share", [*types, self.pointer_type(), mlir_type(i32), mlir_type(i32)])
        k._scope.enter_context(ir.InsertionPoint(block))
        *arguments, k.of_target.workspace, first, end = block.arguments
        k.of_target.each = scf.ForOp(first, end, constant(1, i32).ssa)
        k._scope.enter_context(ir.InsertionPoint(k.of_target.each.body))
        k.open_top()
        return arguments

    def end(self, k):
        scf.yield_([])
        with ir.InsertionPoint(k.of_target.each.operation.block):
            llvm.ReturnOp()
        add_entries(k, k.of_target.types)

    def workgroup_id(self, k, axis):
        """Axis 0 counts all workgroups; a kernel with more axes divides it up itself."""
        if axis:
            raise ValueError(f"{k.name}: x86 has one grid axis, and the kernel asks for axis {axis}")
        return Value(k.of_target.each.induction_variable, i32)

    def private_memory(self, k, size: int):
        """A part of this thread's workspace."""
        pointer = advance(k.of_target.workspace, k.private_bytes, Byte)
        k.private_bytes += -(-size // CACHE_LINE) * CACHE_LINE
        return pointer

    def thread(self, k):
        return 0

    def subgroup(self, k):
        return 0

    def barrier(self):
        pass

    def publish(self):
        """What this thread has stored may be read by others, once they `observe`. No instruction comes of it."""
        llvm.fence(llvm.AtomicOrdering.acq_rel)

    def observe(self):
        """From here on this thread reads what others have published."""
        llvm.fence(llvm.AtomicOrdering.acq_rel)

    deposit, compress = staticmethod(x86_lanes.deposit), staticmethod(x86_lanes.compress)

    # -- to code
    def compile(self, k, source: dict | None = None, opt_level: int = 0) -> CodeObject:
        """The traced kernel as a relocatable ELF object for any machine with `features`. RuntimeError if LLVM fails."""
        with k.context, ir.Location.unknown():
            expand(k.module)
            PassManager.parse(LOWER).run(k.module.operation)
            keep_loops(k.module)
            engine = ExecutionEngine(k.module, opt_level=opt_level, enable_object_dump=True)
            if not engine.raw_lookup(k.name):  # compiles; asked of a name that is not there, LLVM aborts the process
                raise RuntimeError(f"{k.name}: LLVM made no function of it")
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "kernel.o")
                engine.dump_to_object_file(str(file))
                binary = file.read_bytes()
        return CodeObject(
            self.name,
            self.features,
            f"_mlir_{k.name}",
            _signature(k),
            k.grid,
            workgroup_size=1,
            workspace=(Extent(k.private_bytes),) if k.private_bytes else (),
            source=source or {},
            binary=binary,
        )


def _signature(k) -> tuple[Argument, ...]:
    kind = lambda d: ("pointer", d.dtype.name) if isinstance(d, Global) else (d.name, d.name)
    return tuple(Argument(name, *kind(d)) for name, d in k.arguments.items())


x86 = X86()
