"""The CPU: a workgroup is one thread of one core, a fragment piece a wide vector, a launch a loop over workgroups."""

from __future__ import annotations

import ctypes
import time

from ..dtypes import i32
from ..lang.values import Value, constant, mlir_type
from ..mlir import ExecutionEngine, PassManager, ir, llvm, scf
from .gpu import Code, keep_loops

LOWER = (
    "builtin.module(canonicalize,cse,arith-expand{include-bf16=true},convert-scf-to-cf,convert-math-to-llvm,"
    "convert-to-llvm,reconcile-unrealized-casts,canonicalize,cse)"
)


class X86:
    name, lanes = "x86", 1
    vector_bytes = 32  # AVX2
    held_bytes = 512  # 16 registers: what a row may take to be held

    def pointer_type(self):
        return ir.Type.parse("!llvm.ptr")

    def open_module(self):
        return ir.Module.create()

    def begin(self, k, types, is_memory):
        """entry(arguments..., first, end): runs workgroups first <= id < end, so a thread pool can share them out."""
        types = types + [mlir_type(i32), mlir_type(i32)]
        with ir.InsertionPoint(k.module.body):
            f = llvm.LLVMFuncOp(
                f"_mlir_{k.name}", ir.TypeAttr.get(ir.Type.parse(f"!llvm.func<void ({', '.join(map(str, types))})>"))
            )
        block = f.body.blocks.append(*types)
        k._scope.enter_context(ir.InsertionPoint(block))
        *arguments, first, end = block.arguments
        self.each_workgroup = scf.ForOp(first, end, constant(1, i32).ssa)
        k._scope.enter_context(ir.InsertionPoint(self.each_workgroup.body))
        k.open_top()
        return arguments

    def end(self, k):
        scf.yield_([])
        with ir.InsertionPoint(self.each_workgroup.operation.block):
            llvm.ReturnOp()

    def workgroup_id(self, k, axis):
        return Value(self.each_workgroup.induction_variable, i32) if axis == 0 else 0

    def thread(self, k):
        return 0

    def subgroup(self, k):
        return 0

    def barrier(self):
        pass

    def compile(self, k) -> Code:
        start = time.perf_counter()
        with k.context:
            PassManager.parse(LOWER).run(k.module.operation)
            keep_loops(k.module)
            lowered = time.perf_counter()
            engine = ExecutionEngine(k.module, opt_level=2)
            kinds = [
                ctypes.c_float
                if getattr(d, "is_float", False)
                else ctypes.c_int32
                if hasattr(d, "bits")
                else ctypes.c_void_p
                for d in k.arguments.values()
            ]
            call = ctypes.CFUNCTYPE(None, *kinds, ctypes.c_int32, ctypes.c_int32)(engine.raw_lookup(k.name))
        code = Code(str(k.module), k.name, 1, {"lower": lowered - start, "jit": time.perf_counter() - lowered})
        code.call, code.keep = call, (engine, k)
        return code


x86 = X86()
