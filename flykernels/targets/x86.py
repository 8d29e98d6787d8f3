"""The CPU: a workgroup is one thread of one core, a fragment piece a wide vector, a launch a loop over workgroups.

The object file has one entry, `entry(arguments..., workspace, threads)`:

    workspace  pointer to what `Kernel.private` gave out: `CodeObject.workspace_for` bytes for each thread,
               aligned to 64
    threads    i32, how many to use at most. With 2 and more the entry calls libgomp's GOMP_parallel once, and each
               takes a contiguous share of the workgroups; with 1, or one workgroup, it runs them itself.

The number of workgroups is the product of the kernel's grid, worked out by the entry from the arguments.

It needs nothing from outside but the three functions of `POOL`, whose addresses the loader writes into the object, so
one thread pool (the one that torch uses) serves both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import cpu
from ..codeobject import Argument, CodeObject, Extent
from ..dtypes import DType, i32, i64
from ..lang.memory import Global, advance
from ..lang.values import Value, constant, minimum, mlir_type
from ..mlir import ExecutionEngine, PassManager, ir, llvm, scf
from .gpu import keep_loops
from .x86_math import expand

LOWER = (
    "builtin.module(canonicalize,cse,arith-expand{include-bf16=true},convert-scf-to-cf,convert-math-to-llvm,"
    "convert-to-llvm,reconcile-unrealized-casts,canonicalize,cse)"
)
POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
POOL_SYMBOL = "flykernels_pool"  # the object's table of their addresses
CACHE_LINE = 64  # bytes
REGISTERS = {"x86-64-v3": (32, 16), "x86-64-v4": (64, 32)}  # bytes of a vector register, how many


class X86:
    """One CPU target.

    level             "x86-64-v3" (AVX2, FMA, F16C) or "x86-64-v4" (AVX-512); default: the best this machine has
    vector_bytes      of one vector register
    vector_registers  how many there are
    caches            data cache sizes, for blocking
    features          comma-separated, sorted: what a machine needs to run the code
    """

    name, lanes = "x86", 1
    held_bytes = 512  # 16 registers: what a row may take to be held

    def __init__(self, level: str | None = None, caches: cpu.Caches | None = None):
        self.level, self.caches = level or cpu.level(), caches or cpu.caches()
        self.vector_bytes, self.vector_registers = REGISTERS[self.level]
        self.features = ",".join(cpu.needed(self.level))

    # -- what the language asks for
    def pointer_type(self):
        return ir.Type.parse("!llvm.ptr")

    def open_module(self):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            table = ir.Type.parse(f"!llvm.array<{len(POOL)} x ptr>")
            pool = llvm.GlobalOp(
                ir.TypeAttr.get(table), POOL_SYMBOL, ir.Attribute.parse("#llvm.linkage<external>"), dso_local=True
            )
            with ir.InsertionPoint(pool.initializer.blocks.append()):
                llvm.ReturnOp(arg=llvm.mlir_zero(table))
        return module

    def begin(self, k, types, is_memory):
        """share(arguments..., workspace, first, end): runs the workgroups first <= id < end, one after the other."""
        self._types, k.private_bytes = types, 0
        block = self._function(k, f"{k.name}_share", [*types, self.pointer_type(), mlir_type(i32), mlir_type(i32)])
        k._scope.enter_context(ir.InsertionPoint(block))
        *arguments, self._workspace, first, end = block.arguments
        self._each = scf.ForOp(first, end, constant(1, i32).ssa)
        k._scope.enter_context(ir.InsertionPoint(self._each.body))
        k.open_top()
        return arguments

    def end(self, k):
        scf.yield_([])
        with ir.InsertionPoint(self._each.operation.block):
            llvm.ReturnOp()
        self._thread(k)
        self._entry(k)

    def workgroup_id(self, k, axis):
        """Axis 0 counts all workgroups; a kernel with more axes divides it up itself."""
        if axis:
            raise ValueError(f"{k.name}: x86 has one grid axis, and the kernel asks for axis {axis}")
        return Value(self._each.induction_variable, i32)

    def private_memory(self, k, size: int):
        """A part of this thread's workspace."""
        pointer = advance(self._workspace, k.private_bytes, Byte)
        k.private_bytes += -(-size // CACHE_LINE) * CACHE_LINE
        return pointer

    def thread(self, k):
        return 0

    def subgroup(self, k):
        return 0

    def barrier(self):
        pass

    def prefetch(self, pointer, level: int = 1):
        """Asks for the cache line at pointer: level 1 into L1, 2 into L2, 3 into L3."""
        llvm.intr_prefetch(pointer, rw=0, hint=4 - level, cache=1)

    # -- the functions around the kernel
    def _function(self, k, name, types, linkage="internal"):
        """Adds a function and returns its first block. Without CPU and features of its own it would be the host's."""
        with ir.InsertionPoint(k.module.body):
            kind = ir.Type.parse(f"!llvm.func<void ({', '.join(map(str, types))})>")
            f = llvm.LLVMFuncOp(name, ir.TypeAttr.get(kind), linkage=ir.Attribute.parse(f"#llvm.linkage<{linkage}>"))
        f.attributes["target_cpu"] = ir.StringAttr.get(self.level)
        if self.vector_bytes == 64:  # else LLVM would split our 64-byte vectors in two
            f.attributes["target_features"] = ir.Attribute.parse('#llvm.target_features<["-prefer-256-bit"]>')
        return f.body.blocks.append(*types)

    def _pool_call(self, which: str, result, arguments):
        table = llvm.AddressOfOp(self.pointer_type(), POOL_SYMBOL).result
        f = llvm.LoadOp(self.pointer_type(), advance(table, POOL.index(which), Pointer)).result
        call = llvm.CallOp(result, [f, *arguments], [], [])
        return call.result if result is not None else None

    def _thread(self, k):
        """thread(frame): what one thread of the pool does."""
        pointer, n = self.pointer_type(), len(self._types)
        block = self._function(k, f"{k.name}_thread", [pointer])
        with ir.InsertionPoint(block):
            slot = lambda i: advance(block.arguments[0], i, i64)
            arguments = [llvm.LoadOp(t, slot(i)).result for i, t in enumerate(self._types)]
            workspace = llvm.LoadOp(pointer, slot(n)).result
            groups = Value(llvm.LoadOp(mlir_type(i64), slot(n + 1)).result, i64)
            me, team = (
                Value(self._pool_call(f, mlir_type(i32), []), i32).to(i64)
                for f in ("omp_get_thread_num", "omp_get_num_threads")  # the team may be smaller than asked for
            )
            mine = advance(workspace, me * k.private_bytes, Byte)
            share = lambda i: (groups * i // team).to(i32).ssa
            self._call(f"{k.name}_share", [*arguments, mine, share(me), share(me + 1)])
            llvm.ReturnOp()

    def _entry(self, k):
        n = len(self._types)
        block = self._function(
            k, f"_mlir_{k.name}", [*self._types, self.pointer_type(), mlir_type(i32)], linkage="external"
        )
        with ir.InsertionPoint(block):
            *arguments, workspace, threads = block.arguments
            groups = self._groups(k, arguments)
            threads = minimum(Value(threads, i32), groups)
            op = scf.IfOp((threads < 2).ssa, has_else=True)
            with ir.InsertionPoint(op.then_block):
                self._call(f"{k.name}_share", [*arguments, workspace, constant(0, i32).ssa, groups.ssa])
                scf.yield_([])
            with ir.InsertionPoint(op.else_block):
                frame = llvm.AllocaOp(
                    self.pointer_type(), constant(n + 2, i64).ssa, ir.TypeAttr.get(mlir_type(i64))
                ).result
                for i, value in enumerate([*arguments, workspace, groups.to(i64).ssa]):
                    llvm.StoreOp(value, advance(frame, i, i64))
                body = llvm.AddressOfOp(self.pointer_type(), f"{k.name}_thread").result
                self._pool_call("GOMP_parallel", None, [body, frame, threads.ssa, constant(0, i32).ssa])
                scf.yield_([])
            llvm.ReturnOp()

    def _groups(self, k, arguments) -> Value:
        """The grid's product for these arguments."""
        named = dict(zip(k.arguments, arguments))
        count = constant(1, i64)
        for e in (e for axis in k.grid for e in axis):
            if isinstance(e.of, int):
                count = count * e.count({})
            else:
                count = count * ((Value(named[e.of], k.arguments[e.of]).to(i64) + (e.per - 1)) // e.per)
        return count.to(i32)

    def _call(self, name, arguments):
        llvm.CallOp(None, arguments, [], [], callee=name)

    # -- to code
    def compile(self, k, source: dict | None = None, opt_level: int = 1) -> CodeObject:
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


def _signature(k) -> Sequence[Argument]:
    kind = lambda d: ("pointer", d.dtype.name) if isinstance(d, Global) else (d.name, d.name)
    return tuple(Argument(name, *kind(d)) for name, d in k.arguments.items())


Byte = DType("i8", 8, False)
Pointer = DType("!llvm.ptr", 64, False)
x86 = X86()
