"""What the two GPUs share: a `gpu.module` with one `llvm.func`, lowered to assembly text by MLIR alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..dtypes import i32
from ..lang.values import Value, mlir_type
from ..mlir import PassManager, gpu, intrinsic, ir, llvm

LOWER = (
    "builtin.module(canonicalize,cse,gpu.module(convert-scf-to-cf,convert-math-to-llvm,convert-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse))"
)
TO_ASSEMBLY = "builtin.module(gpu-module-to-binary{format=isa})"


def keep_loops(module):
    """convert-to-llvm leaves scf.for's loop annotation where LLVM's export does not look; put it right."""

    def visit(op):
        if "llvm.loop_annotation" in op.attributes:
            op.attributes["loop_annotation"] = op.attributes["llvm.loop_annotation"]
            del op.attributes["llvm.loop_annotation"]
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


@dataclass
class Code:
    """What a target makes of a traced kernel."""

    text: str  # assembly
    entry: str
    workgroup_size: int
    seconds: dict = field(default_factory=dict)  # how long each step took
    binary: bytes = b""


class Gpu:
    device_space, shared_space = 1, 3
    lanes: int
    module_target: str  # MLIR's target attribute
    kernel_attributes: tuple = ()

    def pointer_type(self, space=None):
        return ir.Type.parse(f"!llvm.ptr<{self.device_space if space is None else space}>")

    # -- the function around the kernel
    def open_module(self):
        module = ir.Module.parse(
            "module attributes {gpu.container_module} { gpu.module @k [%s] { } }" % self.module_target
        )
        self.body = module.body.operations[0].regions[0].blocks[0]
        return module

    def begin(self, k, types, is_memory):
        kind = ir.Type.parse(f"!llvm.func<void ({', '.join(map(str, types))})>")
        noalias = ir.ArrayAttr.get(
            [ir.DictAttr.get({"llvm.noalias": ir.UnitAttr.get()} if m else {}) for m in is_memory]
        )
        with ir.InsertionPoint(self.body):
            f = llvm.LLVMFuncOp(k.name, ir.TypeAttr.get(kind), arg_attrs=noalias)
        for name, value in self.function_attributes(k):
            f.attributes[name] = value
        block = f.body.blocks.append(*types)
        k._scope.enter_context(ir.InsertionPoint(block))
        k.open_top()
        return list(block.arguments)

    def end(self, k):
        llvm.ReturnOp()

    def shared_memory(self, k, name, size):
        kind = ir.TypeAttr.get(ir.Type.parse(f"!llvm.array<{size} x i8>"))
        with ir.InsertionPoint.at_block_begin(self.body):
            llvm.GlobalOp(kind, name, ir.Attribute.parse("#llvm.linkage<internal>"), alignment=128, addr_space=3)
        return llvm.AddressOfOp(self.pointer_type(self.shared_space), name).result

    def subgroup(self, k):
        return self.uniform(k.thread // self.lanes) if k.workgroup_size > self.lanes else 0

    # -- to assembly
    def assembly(self, k) -> Code:
        start = time.perf_counter()
        with k.context:
            PassManager.parse(LOWER).run(k.module.operation)
            keep_loops(k.module)
            PassManager.parse(TO_ASSEMBLY).run(k.module.operation)
            (binary,) = [op for op in k.module.body.operations if op.operation.name == "gpu.binary"]
            text = gpu.ObjectAttr(ir.ArrayAttr(binary.attributes["objects"])[0]).object.decode().rstrip("\0")
        return Code(text, k.name, k.workgroup_size, {"lower": time.perf_counter() - start})

    def read(self, name) -> Value:
        return Value(intrinsic(name, mlir_type(i32)), i32)
