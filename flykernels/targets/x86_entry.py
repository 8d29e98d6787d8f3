"""The functions around a kernel in an x86 object: how C, Python and the threads of a pool call it.

`_mlir_NAME(arguments..., workspace, threads)`, for C (and ctypes):

    workspace  pointer to what `Kernel.private` gave out: `CodeObject.workspace_for` bytes for each thread,
               aligned to 64
    threads    i32, how many to use at most. With 2 and more libgomp's GOMP_parallel is called once, and each takes a
               contiguous share of the workgroups; with 1, or one workgroup, the caller runs them itself.

The number of workgroups is the product of the kernel's grid, worked out from the arguments.

`_python_NAME(self, args, count)`, a METH_FASTCALL function of CPython's stable ABI, for calls so short that ctypes
would take longer: args are the pointers as Python ints, and perhaps the first scalar; `self` is an int, the address
of a block of 8-byte slots with all scalars in order, workspace, threads. The GIL is kept.

Nothing is linked. Addresses of what lies outside are written by the loader into two tables, in the order of `POOL` and
`PYTHON`, so that one thread pool (the one that torch uses) serves both.
"""

from __future__ import annotations

from ..dtypes import DType, i32, i64
from ..lang.memory import Global, advance
from ..lang.values import Value, constant, minimum, mlir_type
from ..mlir import ir, llvm, scf

POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
PYTHON = ("PyLong_AsLongLong", "PyErr_Occurred", "PyErr_BadArgument", "Py_IncRef", "None")
TABLES = {"flykernels_pool": POOL, "flykernels_python": PYTHON}
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


def add_tables(module) -> None:
    """The tables of outside addresses, zero until the loader fills them."""
    linkage = ir.Attribute.parse("#llvm.linkage<external>")
    with ir.InsertionPoint(module.body):
        for symbol, names in TABLES.items():
            kind = ir.Type.parse(f"!llvm.array<{len(names)} x ptr>")
            table = llvm.GlobalOp(ir.TypeAttr.get(kind), symbol, linkage, dso_local=True)
            with ir.InsertionPoint(table.initializer.blocks.append()):
                llvm.ReturnOp(arg=llvm.mlir_zero(kind))


def add_entries(k, types) -> None:
    """Adds all three, around `NAME_share(arguments..., workspace, first, end)`. types: the arguments' MLIR types."""
    _thread(k, types)
    _entry(k, types)
    _python(k, types)


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


def _python(k, types) -> None:
    word, pointer = mlir_type(i64), pointer_type()
    scalars = [name for name, d in k.arguments.items() if not isinstance(d, Global)]
    pointers = len(types) - len(scalars)
    block = function(k, f"_python_{k.name}", [pointer, pointer, word], pointer, linkage="external")
    with ir.InsertionPoint(block):
        me, args, count = block.arguments
        given = Value(count, i64)
        fits = given.equals(pointers) | given.equals(pointers + 1)
        first = scalars[0] if scalars and k.arguments[scalars[0]] == i64 else None
        op = scf.IfOp((fits if first else given.equals(pointers)).ssa, results_=[pointer], has_else=True)
        with ir.InsertionPoint(op.else_block):
            _outside("PyErr_BadArgument", mlir_type(i32), [])
            scf.yield_([llvm.mlir_zero(pointer)])
        with ir.InsertionPoint(op.then_block):
            number = lambda i: _outside("PyLong_AsLongLong", word, [_load(args, i, pointer)])
            bound = llvm.inttoptr(pointer, _outside("PyLong_AsLongLong", word, [me]))
            values, seen = [], 0
            for name, kind in zip(k.arguments, types):
                if name not in scalars:
                    values.append(llvm.inttoptr(pointer, number(seen)))
                    seen += 1
                elif name == first:
                    more = scf.IfOp((given > pointers).ssa, results_=[word], has_else=True)
                    with ir.InsertionPoint(more.then_block):
                        scf.yield_([number(pointers)])
                    with ir.InsertionPoint(more.else_block):
                        scf.yield_([_load(bound, 0, word)])
                    values.append(more.results[0])
                else:
                    values.append(_load(bound, scalars.index(name), kind))
            values += [_load(bound, len(scalars), pointer), _load(bound, len(scalars) + 1, mlir_type(i32))]
            failed = llvm.ptrtoint(word, _outside("PyErr_Occurred", pointer, []))
            good = scf.IfOp(Value(failed, i64).equals(0).ssa, results_=[pointer], has_else=True)
            with ir.InsertionPoint(good.then_block):
                _call(f"_mlir_{k.name}", values)
                nothing = _from_table("None")
                _outside("Py_IncRef", None, [nothing])
                scf.yield_([nothing])
            with ir.InsertionPoint(good.else_block):
                scf.yield_([llvm.mlir_zero(pointer)])
            scf.yield_([good.results[0]])
        llvm.ReturnOp(arg=op.results[0])


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


def _load(pointer, slot: int, kind):
    return llvm.LoadOp(kind, advance(pointer, slot, i64)).result


def _from_table(which: str):
    symbol = next(s for s, names in TABLES.items() if which in names)
    table = llvm.AddressOfOp(pointer_type(), symbol).result
    return llvm.LoadOp(pointer_type(), advance(table, TABLES[symbol].index(which), Pointer)).result


def _outside(which: str, result, arguments):
    """A call through a table."""
    call = llvm.CallOp(result, [_from_table(which), *arguments], [], [])
    return call.result if result is not None else None


def _call(name: str, arguments) -> None:
    llvm.CallOp(None, arguments, [], [], callee=name)
