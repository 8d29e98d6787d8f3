"""The functions around a kernel in an x86 object: how C, Python and the threads of a pool call it.

`_mlir_NAME(arguments..., workspace, threads)`, for C (and ctypes):

    workspace  pointer to what `Kernel.private` gave out: `CodeObject.workspace_for` bytes for each thread,
               aligned to 64
    threads    i32, how many to use at most. With 2 and more libgomp's GOMP_parallel is called once, and each takes a
               contiguous share of the workgroups; with 1, or one workgroup, the caller runs them itself.

The number of workgroups is the product of the kernel's grid, worked out from the arguments.

`python_NAME`, for Python: see x86_python.py.

Nothing is linked. Addresses of what lies outside are written by the loader into one table, in the order of
`launch.outside.OUTSIDE`, so that one thread pool (the one that torch uses) serves all.
"""

from __future__ import annotations

from ..dtypes import DType, i32, i64
from ..lang.memory import Global, advance
from ..lang.values import Value, constant, minimum, mlir_type
from ..launch.outside import OUTSIDE, OUTSIDE_SYMBOL
from ..mlir import ir, llvm, scf
from . import x86_python

Byte = DType("i8", 8, False)
Pointer = DType("!llvm.ptr", 64, False)


def pointer_type():
    return ir.Type.parse("!llvm.ptr")


def function(k, name: str, types, result=None, linkage: str = "internal"):
    """Adds a function to the kernel's module, for the target's processor, and returns its first block."""
    with ir.InsertionPoint(k.module.body):
        kind = ir.Type.parse(f"!llvm.func<{result or 'void'} ({', '.join(map(str, types))})>")
        f = llvm.LLVMFuncOp(name, ir.TypeAttr.get(kind), linkage=ir.Attribute.parse(f"#llvm.linkage<{linkage}>"))
    f.attributes["target_cpu"] = ir.StringAttr.get(k.target.level)
    if k.target.vector_bytes == 64:  # else LLVM would split our 64-byte vectors in two
        f.attributes["target_features"] = ir.Attribute.parse('#llvm.target_features<["-prefer-256-bit"]>')
    return f.body.blocks.append(*types)


def add_table(module) -> None:
    """The table of outside addresses, zero until the loader fills it."""
    kind = ir.Type.parse(f"!llvm.array<{len(OUTSIDE)} x ptr>")
    with ir.InsertionPoint(module.body):
        linkage = ir.Attribute.parse("#llvm.linkage<external>")
        table = llvm.GlobalOp(ir.TypeAttr.get(kind), OUTSIDE_SYMBOL, linkage, dso_local=True)
        with ir.InsertionPoint(table.initializer.blocks.append()):
            llvm.ReturnOp(arg=llvm.mlir_zero(kind))


def add_entries(k, types) -> None:
    """Adds the entries around `NAME_share(arguments..., workspace, first, end)`. types: the arguments' MLIR types."""
    _thread(k, types)
    _entry(k, types)
    if all(isinstance(d, Global) or not d.is_float for d in k.arguments.values()):
        external = lambda name, types, result: function(k, name, types, result, linkage="external")
        x86_python.emit(k, external, _outside, pointer_type(), f"_mlir_{k.name}")


def _thread(k, types) -> None:
    """NAME_thread(frame): what one thread of the pool does."""
    n = len(types)
    block = function(k, f"{k.name}_thread", [pointer_type()])
    with ir.InsertionPoint(block):
        slot = lambda i, kind: llvm.LoadOp(kind, advance(block.arguments[0], i, i64)).result
        arguments = [slot(i, kind) for i, kind in enumerate(types)]
        workspace, groups = slot(n, pointer_type()), Value(slot(n + 1, mlir_type(i64)), i64)
        me, team = (
            Value(_outside(f, mlir_type(i32), []), i32).to(i64)
            for f in ("omp_get_thread_num", "omp_get_num_threads")  # the team may be smaller than asked for
        )
        share = lambda i: (groups * i // team).to(i32).ssa
        mine = advance(workspace, me * k.private_bytes, Byte)
        _call(f"{k.name}_share", [*arguments, mine, share(me), share(me + 1)])
        llvm.ReturnOp()


def _entry(k, types) -> None:
    block = function(k, f"_mlir_{k.name}", [*types, pointer_type(), mlir_type(i32)], linkage="external")
    with ir.InsertionPoint(block):
        *arguments, workspace, threads = block.arguments
        groups = _groups(k, arguments)
        threads = minimum(Value(threads, i32), groups)
        op = scf.IfOp((threads < 2).ssa, has_else=True)
        with ir.InsertionPoint(op.then_block):
            _call(f"{k.name}_share", [*arguments, workspace, constant(0, i32).ssa, groups.ssa])
            scf.yield_([])
        with ir.InsertionPoint(op.else_block):
            slots = [*arguments, workspace, groups.to(i64).ssa]
            word, count = ir.TypeAttr.get(mlir_type(i64)), constant(len(slots), i64).ssa
            frame = llvm.AllocaOp(pointer_type(), count, word).result
            for i, value in enumerate(slots):
                llvm.StoreOp(value, advance(frame, i, i64))
            body = llvm.AddressOfOp(pointer_type(), f"{k.name}_thread").result
            _outside("GOMP_parallel", None, [body, frame, threads.ssa, constant(0, i32).ssa])
            scf.yield_([])
        llvm.ReturnOp()


def _groups(k, arguments) -> Value:
    """The grid's product for these arguments."""
    named = dict(zip(k.arguments, arguments))
    count = constant(1, i64)
    for e in (e for axis in k.grid for e in axis):
        if isinstance(e.of, int):
            count = count * e.count({})
        else:
            count = count * ((Value(named[e.of], k.arguments[e.of]).to(i64) + (e.per - 1)) // e.per)
    return count.to(i32)


def _outside(which: str, result, arguments):
    """A call through the table."""
    table = llvm.AddressOfOp(pointer_type(), OUTSIDE_SYMBOL).result
    address = llvm.LoadOp(pointer_type(), advance(table, OUTSIDE.index(which), Pointer)).result
    call = llvm.CallOp(result, [address, *arguments], [], [])
    return call.result if result is not None else None


def _call(name: str, arguments) -> None:
    llvm.CallOp(None, arguments, [], [], callee=name)
