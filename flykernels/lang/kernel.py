"""The tracer. A kernel is a Python function `kernel(k, problem, config)`; calling it once writes the MLIR.

A Python `for` unrolls. What must stay a loop or a branch is a function, decorated:

    @k.loop(0, tiles, carry=acc)          @k.when(row < rows)
    def acc(t, acc):                      def _():
        ...                                   y.store(...)
        return acc + x

The parameters are the carried values, `return` hands them to the next turn, and the function's name is what comes out.
That is SSA's own shape: a name made inside cannot be used outside, because Python does not let it out either.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from ..codeobject import Argument, Extent, TensorMap
from ..dtypes import DType, i32, i64
from ..layout import IDENTITY
from ..mlir import ir, scf, source_locations
from .errors import TraceError, located
from .fragment import Fragment
from .memory import Global, View
from .values import TARGET, Value, constant, mlir_type

STAY_A_LOOP = "#llvm.loop_annotation<unroll = <disable = true>>"  # what Python did not unroll, LLVM shall not either

TRACING = threading.RLock()  # a target holds the module being written, and Python's interpreter lock is held anyway


class Kernel:
    """One kernel while it is being traced for one target."""

    def __init__(self, target, name: str, workgroup_size: int):
        self.target, self.name, self.workgroup_size = target, name, workgroup_size
        self.arguments: dict[str, Any] = {}
        self.source: dict = {}  # what is being built, readable: see CodeObject.source
        self.shared_bytes, self.loops = 0, 0  # LDS asked for; loops being traced
        self.grid: tuple[tuple[Extent, ...], ...] = ((Extent(1),),)  # workgroups along each axis; see codeobject.Extent
        self.workspace: tuple[Extent, ...] = ()  # bytes asked of the launcher, as factors; see codeobject.CodeObject
        self.tensor_maps: tuple[TensorMap, ...] = ()  # parameters after the arguments; see codeobject.TensorMap
        self.grid_most = 0  # workgroups launched at most; see codeobject.CodeObject
        self.cluster = 1  # workgroups of a cluster, where the target has them
        self.overlaps = False  # whether it may be launched before the kernel ahead has ended; see codeobject.CodeObject
        self.context: Any = None
        self.module: Any = None
        self._scope = ExitStack()  # what is open
        self.of_target = SimpleNamespace()  # what the target keeps of this kernel: targets are shared by threads
        self._maps: dict[str, Any] = {}
        self._known: dict = {}  # what has been computed once at the top
        self._at_top: dict[int, Value] = {}  # arguments, and what has been computed from them there

    # -- arguments, launch, and who am I
    def args(self, **declared):
        """Declare the entry's arguments, in order: `Global(...)` for memory, a DType for a scalar.

        Sizes and strides of a Global may name scalars that are declared before or after it. Where `self.tensor_maps`
        lists any, their parameters follow; `tensor_map(name)` then gives a pointer to one."""
        self.arguments = declared
        is_memory = lambda d: isinstance(d, Global)
        types = [self.target.pointer_type() if is_memory(d) else mlir_type(d) for d in declared.values()]
        values = self.target.begin(self, types, [is_memory(d) for d in declared.values()])
        got = dict(zip(declared, values))
        self._maps = {t.name: v for t, v in zip(self.tensor_maps, values[len(declared) :])}
        scalars = {n: Value(got[n], d) for n, d in declared.items() if not is_memory(d)}
        self._at_top = {id(v.ssa): v for v in scalars.values()}
        return [d.view(got[n], scalars) if is_memory(d) else scalars[n] for n, d in declared.items()]

    def tensor_map(self, name: str):
        """A generic pointer to the parameter that the launcher makes as the `TensorMap` of this name says."""
        return self._maps[name]

    def signature(self) -> tuple[Argument, ...]:
        """The declared arguments as a code object lists them."""
        pointer = lambda d: isinstance(d, Global)
        kind = lambda d: "pointer" if pointer(d) else d.name
        return tuple(Argument(n, kind(d), d.dtype.name if pointer(d) else d.name) for n, d in self.arguments.items())

    def open_top(self):
        """Called by the target where the kernel's body begins."""
        self._top = constant(0, i32).ssa.owner

    def once(self, key, make, uses=()):
        """A value that depends on arguments and ids only: computed at the top, so it may be used anywhere.

        `uses`: Values that `make` reads; if one is not itself known at the top, the value is computed here instead."""
        if not all(id(v.ssa) in self._at_top for v in uses):
            return make()
        if key not in self._known:
            with ir.InsertionPoint(self._top):
                self._known[key] = value = make()
            if isinstance(value, Value):
                self._at_top[id(value.ssa)] = value
        return self._known[key]

    def workgroup_id(self, axis=0) -> Value:
        return self.once(("workgroup", axis), lambda: self.target.workgroup_id(self, axis))

    @property
    def thread(self):
        """Index in the workgroup: 0 .. workgroup_size - 1. The int 0 where a workgroup is one thread."""
        return self.once("thread", lambda: self.target.thread(self))

    @property
    def subgroup(self):
        """Index of the wave (warp) in the workgroup; uniform, so it lives in a scalar register."""
        return self.once("subgroup", lambda: self.target.subgroup(self))

    def afresh(self):
        """From here on what depends on the thread's index is computed anew, and does not live through what came before.

        An epilogue addresses memory by the same digits of the index as the prologue; without this LLVM keeps them in
        registers all through a main loop that needs each. In the body of a `loop` or `when`, only if the kernel ends
        with it. Nothing changes on a CPU."""
        if "thread" not in self._known or not isinstance(self._known["thread"], Value):
            return
        kept = {"subgroup", "direct to LDS"}  # in a scalar register; none at all
        known_bits = (1 << (self.workgroup_size - 1).bit_length()) - 1
        thread = self.target.opaque(self._known["thread"]) & known_bits
        self._known = {key: v for key, v in self._known.items() if key in kept} | {"thread": thread}
        self._at_top[id(thread.ssa)] = thread
        self.open_top()

    # -- control
    def loop(self, lo, hi, step=1, carry=()):
        """Decorator: run the body for lo, lo+step, ... < hi. `carry`: a Value, Fragment, or nest of tuples of them."""

        def run(body):
            leaves, rebuild = flatten(carry)
            wide = any(isinstance(x, Value) and x.dtype == i64 for x in (lo, hi, step))
            kind = i64 if wide else i32  # of the loop's variable: i64 where a bound is
            bounds = [x.to(kind).ssa if isinstance(x, Value) else constant(x, kind).ssa for x in (lo, hi, step)]
            op = scf.ForOp(*bounds, [v.ssa for v in leaves])
            op.attributes["llvm.loop_annotation"] = ir.Attribute.parse(STAY_A_LOOP)
            self.loops += 1
            with ir.InsertionPoint(op.body):
                now = rebuild([Value(s, v.dtype, v.width) for s, v in zip(op.inner_iter_args, leaves)])
                out = body(Value(op.induction_variable, kind), *([now] if carry != () else []))
                after, _ = flatten(() if out is None else out)
                self._same("loop", body, leaves, after)
                scf.yield_([v.ssa for v in after])
            self.loops -= 1
            return rebuild([Value(s, v.dtype, v.width) for s, v in zip(op.results, leaves)])

        return run

    def in_place(self, carry):
        """Decorator: run the body once, on `carry`, such that each carried Value comes out in the register it was in.

        It is a loop of one turn of which LLVM does not know that; straight-line code it lets wander about."""
        once = self.target.opaque(constant(1, i32), uniform=True)
        return lambda body: self.loop(0, once, carry=carry)(lambda _, now: body(now))

    def repeat(self, carry, going):
        """Decorator: run the body while going(carried) holds, which is asked first.

        Where lanes exchange values in the body, it must be the same for all lanes of a wave."""

        def run(body):
            leaves, rebuild = flatten(carry)
            types = [v.ssa.type for v in leaves]
            op = scf.WhileOp(types, [v.ssa for v in leaves])
            again = lambda ssas: rebuild([Value(s, v.dtype, v.width) for s, v in zip(ssas, leaves)])
            before = op.before.blocks.append(*types)
            with ir.InsertionPoint(before):
                scf.ConditionOp(going(again(before.arguments)).ssa, list(before.arguments))
            after = op.after.blocks.append(*types)
            self.loops += 1
            with ir.InsertionPoint(after):
                scf.yield_([v.ssa for v in flatten(body(again(after.arguments)))[0]])
            self.loops -= 1
            return again(op.results)

        return run

    def when(self, condition, carry=()):
        """Decorator: the body runs where condition holds. A condition that Python knows is decided now.

        `carry`: values that the body is given and returns anew, as a loop's; where it does not run they stay."""

        def run(body):
            arguments = [carry] if carry != () else []
            if isinstance(condition, bool):
                return body(*arguments) if condition else carry
            leaves, rebuild = flatten(carry)
            op = scf.IfOp(condition.ssa, [v.ssa.type for v in leaves], has_else=bool(leaves))
            with ir.InsertionPoint(op.then_block):
                out = body(*arguments)
                after, _ = flatten(() if out is None or not leaves else out)
                self._same("branch", body, leaves, after)
                scf.yield_([v.ssa for v in after])
            if leaves:
                with ir.InsertionPoint(op.else_block):
                    scf.yield_([v.ssa for v in leaves])
            return rebuild([Value(s, v.dtype, v.width) for s, v in zip(op.results, leaves)])

        return run

    @staticmethod
    def _same(kind: str, body, leaves, after):
        if [(v.dtype, v.width) for v in after] != [(v.dtype, v.width) for v in leaves]:
            raise TraceError(
                f"the {kind} {body.__name__} carries {leaves} but its body returns {after}",
                "return from the body one value of the same type for each one carried",
            )

    def branch(self, condition: Value, yes, no):
        """yes() where condition holds, else no(): the two arms of one branch, for roles that threads keep."""
        op = scf.IfOp(condition.ssa, has_else=True)
        for block, body in ((op.then_block, yes), (op.else_block, no)):
            with ir.InsertionPoint(block):
                body()
                scf.yield_([])

    def choose(self, condition: Value, yes, otherwise):
        """What yes() gives where condition holds, else `otherwise`, or what it gives if it is a function: Values,
        Fragments, or nests of tuples of them, of the same types."""
        arms = scf.IfOp(condition.ssa, has_else=True)  # which types they give is known after they are traced
        found = []
        for block, body in ((arms.then_block, yes), (arms.else_block, otherwise)):
            with ir.InsertionPoint(block):
                found.append(flatten(body() if callable(body) else body))
                scf.yield_([v.ssa for v in found[-1][0]])
        (gives, rebuild), (leaves, _) = found
        if [(v.dtype, v.width) for v in gives] != [(v.dtype, v.width) for v in leaves]:
            raise TraceError(f"a choice gives {gives} or {leaves}", "give values of the same types either way")
        whole = ir.Operation.create("scf.if", [v.ssa.type for v in leaves], [condition.ssa], regions=2)
        for block, region in zip((arms.then_block, arms.else_block), whole.regions, strict=True):
            block.append_to(region)
        arms.erase()
        return rebuild([Value(s, v.dtype, v.width) for s, v in zip(whole.results, leaves)])

    # -- workgroup
    def wait_loads(self, in_flight: int | None):
        """Until all but this wave's youngest `in_flight` loads from memory have landed (None: go on).

        Says nothing of other waves: a barrier must follow before their data is read."""
        if in_flight is not None:
            self.target.wait_loads(in_flight)

    def barrier(self):
        """All threads are here, and what each wrote to shared memory by ordinary stores is seen by all."""
        self.target.barrier()

    def phase_end(self):
        """A barrier that nothing crosses, arithmetic included.

        What one half of the waves does while the other waits is part of the plan; the compiler must not undo it."""
        self.target.pin()
        self.target.barrier()
        self.target.pin()

    def urgent(self, body):
        """Decorator: the scheduler prefers this wave to its neighbours while it runs the body."""
        self.target.priority(1)
        out = body()
        self.target.priority(0)
        return out

    def shared(self, dtype: DType, layout, swizzle=IDENTITY) -> View:
        """Workgroup memory (LDS) laid out as told; swizzle acts on the element offset."""
        size = layout.cosize * dtype.bytes
        pointer = self.target.shared_memory(self, f"{self.name}_shared_{self.shared_bytes}", size)
        self.shared_bytes += size
        return View(pointer, dtype, layout.shape, layout.stride, swizzle or IDENTITY)

    def private(self, dtype: DType, *shape) -> View:
        """Scratch memory of this thread, row-major, aligned to a cache line; what it holds at first is undefined."""
        return Global(dtype, shape).view(self.target.private_memory(self, prod(shape) * dtype.bytes))

    def fragment(self, layout, streamed=False, elementwise=False) -> Holder:
        """A way to hold a tile in registers; see `Holder`. streamed: one piece at a time, the rest re-read.
        elementwise: elements of a vector are not neighbours in memory, each is moved by itself."""
        return Holder(self, layout, streamed, elementwise)


class Holder:
    """Who holds what, ready to load and store.

    held      every piece is read once and stays in registers; pieces unroll.
    streamed  a piece lives for one turn of a loop; each use of the fragment re-reads memory. For rows that no register
              file holds (a CPU's, or a very long row): same kernel text. What is read must not be written in between.
    elementwise  each element of a vector is moved by itself: for operands whose vectors are not contiguous."""

    def __init__(self, k, layout, streamed=False, elementwise=False):
        self.k, self.layout, self.streamed, self.elementwise = k, layout, streamed, elementwise

    def load(self, view: View) -> Fragment:
        read = lambda digits: view.load(self.k, self.layout, digits, self.elementwise)
        return Fragment(self.k, self.layout, self.streamed, read)

    def store(self, view: View, fragment: Fragment):
        fragment.each(lambda digits, v: view.store(self.k, self.layout, digits, v, self.elementwise))

    def zeros(self, dtype: DType) -> Fragment:
        return Fragment(self.k, self.layout, False, lambda _: constant(0, dtype, self.layout.vector.size))


def flatten(tree):
    """A nest of Values and Fragments -> (its Values, a function that rebuilds the nest from as many Values)."""
    if isinstance(tree, Value):
        return [tree], lambda vs: vs[0]
    if isinstance(tree, Fragment):
        return tree.values(), tree.like
    parts = [flatten(x) for x in tree]

    def rebuild(vs):
        out = []
        for leaves, make in parts:
            out.append(make(vs[: len(leaves)]))
            vs = vs[len(leaves) :]
        return tuple(out)

    return [v for leaves, _ in parts for v in leaves], rebuild


def trace(kernel, target, problem, config, name=None) -> Kernel:
    """Run `kernel` once for `target`; the Kernel that comes back holds the MLIR module. TraceError if it cannot be.

    config.workgroup_size: threads of a workgroup. name: the entry's symbol (default: the function's name), of letters,
    digits and _: assemblers take nothing else, and LLVM's PTX printer ends the process over it."""
    name = name or kernel.__name__
    if not (name.isascii() and name.isidentifier()):
        raise TraceError(f"a kernel cannot be named {name!r}", "say name=, of ASCII letters, digits and _")
    token = TARGET.set(target)
    try:
        with TRACING, ir.Context() as context, ir.Location.unknown(), source_locations():
            k = Kernel(target, name, config.workgroup_size)
            k.context, k.module = context, target.open_module()
            k.source = {"kernel": name, "problem": described(problem), "config": described(config)}
            with k._scope:
                kernel(k, problem, config)
                target.end(k)
            k.module.operation.verify()
            return k
    except Exception as e:
        raise located(e, name) from e
    finally:
        TARGET.reset(token)


def described(x):
    """A problem or configuration as plain data, for a code object's `source`."""
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: described(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, (list, tuple)):
        return [described(e) for e in x]
    if isinstance(x, dict):
        return {str(n): described(e) for n, e in x.items()}
    return x if x is None or isinstance(x, (bool, int, float, str)) else repr(x)
