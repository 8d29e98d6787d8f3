"""The door from Python into an x86 kernel: a C function of CPython's METH_FASTCALL convention, in the object itself.

    PyObject *python_NAME(PyObject *self, PyObject *const *args, Py_ssize_t count)

`args` are Python ints, one for each argument of the kernel (anything else: TypeError); `self` is an int, the address of
a Frame. Against a call through ctypes this saves about a microsecond with ten arguments: no conversion objects are
made, and threads and workspace are looked after here.
The GIL is released while the kernel runs. The result is the number of threads that were allowed, an int.

Frame, two words of 8 bytes: [0] address of a spare workspace or 0, [1] the most threads to use or 0 for no limit.
The spare is taken out by an atomic exchange and put back after the call, so Python threads in one kernel never share
it: who finds none allocates, who finds another put back frees it. A workspace begins with its size in bytes, in a
cache line of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from ..dtypes import i32, i64
from ..lang.memory import Global, advance
from ..lang.values import Value, constant, minimum, mlir_type, select
from ..mlir import ir, llvm, scf

LINE = 64  # bytes


def emit(k, function: Callable, call: Callable, pointer, entry: str) -> None:
    """Write `python_NAME` for the kernel `k`, whose C entry is `entry`. Arguments must be pointers or integers.

    function(name, argument types, result type) -> its first block
    call(which of launch.outside.DOOR, result type or None, operands) -> result"""
    block = function(f"python_{k.name}", [pointer, pointer, mlir_type(i64)], pointer)
    with ir.InsertionPoint(block):
        self_, args, count = block.arguments
        failure = lambda: llvm.mlir_zero(pointer)
        right = scf.IfOp(Value(count, i64).equals(len(k.arguments)).ssa, [pointer], has_else=True)
        with ir.InsertionPoint(right.else_block):
            call("PyErr_BadArgument", mlir_type(i32), [])
            scf.yield_([failure()])
        with ir.InsertionPoint(right.then_block):
            values, frame = _converted(k, self_, args, call, pointer)
            error = Value(llvm.ptrtoint(mlir_type(i64), call("PyErr_Occurred", pointer, [])), i64)
            sound = scf.IfOp(error.equals(0).ssa, [pointer], has_else=True)
            with ir.InsertionPoint(sound.else_block):
                scf.yield_([failure()])
            with ir.InsertionPoint(sound.then_block):
                scf.yield_([_run(k, values, frame, call, pointer, entry)])
            scf.yield_([sound.results[0]])
        llvm.ReturnOp(arg=right.results[0])


def _converted(k, self_, args, call: Callable, pointer) -> tuple[list, object]:
    """The kernel's arguments and the frame's address, from Python's ints. An error is left for PyErr_Occurred."""
    integer = lambda o: Value(call("PyLong_AsUnsignedLongLongMask", mlir_type(i64), [o]), i64)
    values = []
    for i, declared in enumerate(k.arguments.values()):
        value = integer(llvm.LoadOp(pointer, advance(args, i, i64)).result)
        is_memory = isinstance(declared, Global)
        values.append(llvm.inttoptr(pointer, value.ssa) if is_memory else value.to(declared).ssa)
    return values, llvm.inttoptr(pointer, integer(self_).ssa)


def _run(k, values: list, frame, call: Callable, pointer, entry: str):
    """Call the kernel without the GIL, with workspace from the frame; the threads it was allowed, as a Python int."""
    limit = Value(llvm.LoadOp(mlir_type(i64), advance(frame, 1, i64)).result, i64).to(i32)
    state = call("PyEval_SaveThread", pointer, [])
    most = Value(call("omp_get_max_threads", mlir_type(i32), []), i32)
    threads = select(limit.equals(0), most, minimum(limit, most))
    allowed = lambda: call("PyLong_FromLong", pointer, [threads.to(i64).ssa])
    if not k.private_bytes:
        llvm.CallOp(None, [*values, llvm.mlir_zero(pointer), threads.ssa], [], [], callee=entry)
        call("PyEval_RestoreThread", None, [state])
        return allowed()
    held = _take(frame, threads, k.private_bytes, call, pointer)
    got = scf.IfOp((Value(llvm.ptrtoint(mlir_type(i64), held), i64) > 0).ssa, [pointer], has_else=True)
    with ir.InsertionPoint(got.then_block):
        workspace = advance(held, LINE // i64.bytes, i64)
        llvm.CallOp(None, [*values, workspace, threads.ssa], [], [], callee=entry)
        call("free", None, [_exchange(frame, held, pointer)])
        call("PyEval_RestoreThread", None, [state])
        scf.yield_([allowed()])
    with ir.InsertionPoint(got.else_block):
        call("PyEval_RestoreThread", None, [state])
        scf.yield_([call("PyErr_NoMemory", pointer, [])])
    return got.results[0]


def _take(frame, threads: Value, bytes_a_thread: int, call: Callable, pointer):
    """A workspace for as many threads: the spare if it is large enough, else a new one; null if memory is out."""
    needed = threads.to(i64) * bytes_a_thread + LINE
    spare = _exchange(frame, llvm.mlir_zero(pointer), pointer)
    missing = Value(llvm.ptrtoint(mlir_type(i64), spare), i64).equals(0)
    size = scf.IfOp(missing.ssa, [mlir_type(i64)], has_else=True)
    with ir.InsertionPoint(size.then_block):
        scf.yield_([constant(0, i64).ssa])
    with ir.InsertionPoint(size.else_block):
        scf.yield_([llvm.LoadOp(mlir_type(i64), spare).result])
    small = Value(size.results[0], i64) < needed
    op = scf.IfOp(small.ssa, [pointer], has_else=True)
    with ir.InsertionPoint(op.then_block):
        call("free", None, [spare])
        fresh = call("aligned_alloc", pointer, [constant(LINE, i64).ssa, needed.ssa])
        made = scf.IfOp((Value(llvm.ptrtoint(mlir_type(i64), fresh), i64) > 0).ssa)
        with ir.InsertionPoint(made.then_block):
            llvm.StoreOp(needed.ssa, fresh)
            scf.yield_([])
        scf.yield_([fresh])
    with ir.InsertionPoint(op.else_block):
        scf.yield_([spare])
    return op.results[0]


def _exchange(frame, value, pointer):
    """Atomically: what was in the frame's first word, and `value` in its place."""
    new = llvm.ptrtoint(mlir_type(i64), value)
    old = llvm.atomicrmw(llvm.AtomicBinOp.xchg, frame, new, llvm.AtomicOrdering.acq_rel)
    return llvm.inttoptr(pointer, old)
