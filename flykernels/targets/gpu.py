"""What the two GPUs share: limits, a `gpu.module` with one `llvm.func`, lowered to assembly text by MLIR alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..dtypes import i32
from ..lang.errors import TraceError, located
from ..lang.values import Value, mlir_type
from ..mlir import PassManager, gpu, intrinsic, ir, llvm
from ..versions import mlir_version

LOWER = (
    "builtin.module(canonicalize,cse,gpu.module(convert-scf-to-cf,convert-math-to-llvm,convert-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse))"
)
TO_ASSEMBLY = "builtin.module(gpu-module-to-binary{format=isa})"


@dataclass(frozen=True)
class GpuLimits:
    """What one GPU has, for choosing configurations.

    lanes             threads of a wave (warp)
    max_workgroup     threads of a workgroup
    shared_bytes      LDS (shared memory) a workgroup may use
    vector_bytes      of the widest memory access of one lane
    banks             of shared memory, 4 bytes each
    registers         32-bit vector registers of a SIMD and lane, shared out among the waves on it
    wave_registers    the most that one wave can use
    register_step     a wave's registers come in multiples of this
    max_waves         waves on a SIMD
    simds             of a compute unit
    compute_units     of the whole GPU
    shared_read       bytes a cycle that a compute unit reads from shared memory
    shared_fill       bytes a cycle that come from memory (the caches) into a compute unit's shared memory
    latency           cycles from a load to its data, memory cold
    dies              that share no L2 cache; workgroups are dealt out to them in turn
    l2_bytes          of L2, where candidates depend on it
    """

    lanes: int
    max_workgroup: int
    shared_bytes: int
    vector_bytes: int
    banks: int
    registers: int
    wave_registers: int
    register_step: int
    max_waves: int
    simds: int
    compute_units: int
    shared_read: int
    shared_fill: int
    latency: int
    dies: int = 1
    l2_bytes: int = 0

    def waves_with(self, registers: int) -> int:
        """Waves that fit on a SIMD if each uses so many registers; 0 if not even one does."""
        if registers > self.wave_registers:
            return 0
        step = self.register_step
        return min(self.max_waves, self.registers // max(step, -(-registers // step) * step))


def keep_loops(module):
    """convert-to-llvm leaves scf.for's loop annotation where LLVM's export does not look; put it right."""

    def visit(op):
        if "llvm.loop_annotation" in op.attributes:
            op.attributes["loop_annotation"] = op.attributes["llvm.loop_annotation"]
            del op.attributes["llvm.loop_annotation"]
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


def _run(k, passes: str) -> None:
    """Passes over a kernel's module, in its context. TraceError with the user's line if one refuses."""
    try:
        PassManager.parse(passes).run(k.module.operation)
    except ir.MLIRError as e:
        raise located(e, k.name) from e


def _body(k):
    """The block of the kernel's gpu.module."""
    return k.module.body.operations[0].regions[0].blocks[0]


class Gpu:
    """The parts of a GPU target that do not depend on the maker."""

    name: str
    limits: GpuLimits
    lanes: int
    scopes: Mapping[str, str]  # LLVM's names of "workgroup" and "device"
    module_target: str  # MLIR's target attribute
    device_space, shared_space = 1, 3  # LLVM's address spaces
    register: str  # LLVM's letters for a register of 32 bits: one that each lane has its own value in,
    uniform_register: str  # and one that a wave has

    def pointer_type(self, space=None):
        return ir.Type.parse(f"!llvm.ptr<{self.device_space if space is None else space}>")

    # -- the function around the kernel
    def open_module(self):
        return ir.Module.parse(
            f"module attributes {{gpu.container_module}} {{ gpu.module @k [{self.module_target}] {{ }} }}"
        )

    def begin(self, k, types, is_memory):
        """Opens the kernel's function; returns its arguments."""
        if not 0 < k.workgroup_size <= self.limits.max_workgroup or k.workgroup_size % self.limits.lanes:
            raise TraceError(
                f"a workgroup of {k.workgroup_size} threads on {self.name}",
                f"whole waves of {self.limits.lanes}, at most {self.limits.max_workgroup} threads",
            )
        maps = self.map_parameters(k)
        types = [*types, *(kind for kind, _ in maps)]
        kind = ir.Type.parse(f"!llvm.func<void ({', '.join(map(str, types))})>")
        noalias = [ir.DictAttr.get({"llvm.noalias": ir.UnitAttr.get()} if m else {}) for m in is_memory]
        attributes = ir.ArrayAttr.get([*noalias, *(a for _, a in maps)])
        with ir.InsertionPoint(_body(k)):
            f = llvm.LLVMFuncOp(k.name, ir.TypeAttr.get(kind), arg_attrs=attributes)
        for name, value in self.function_attributes(k):
            f.attributes[name] = value
        block = f.body.blocks.append(*types)
        k._scope.enter_context(ir.InsertionPoint(block))
        k.open_top()
        return list(block.arguments)

    def end(self, k):
        if k.shared_bytes > self.limits.shared_bytes:
            raise TraceError(
                f"{k.shared_bytes} bytes of shared memory; {self.name} has {self.limits.shared_bytes} a workgroup",
                "fewer stages or a smaller tile",
            )
        llvm.ReturnOp()

    def map_parameters(self, k) -> list:
        """(type, attributes) of the parameters that k.tensor_maps stand for. TraceError where a target has none."""
        if k.tensor_maps:
            raise TraceError(f"tensor maps on {self.name}, which has no such thing")
        return []

    def function_attributes(self, k) -> list:
        """(name, attribute) pairs that make the function a kernel of this target."""
        raise NotImplementedError

    def shared_memory(self, k, name, size):
        """A pointer to `size` bytes of the workgroup's memory, aligned to 128."""
        kind = ir.TypeAttr.get(ir.Type.parse(f"!llvm.array<{size} x i8>"))
        with ir.InsertionPoint.at_block_begin(_body(k)):
            llvm.GlobalOp(kind, name, ir.Attribute.parse("#llvm.linkage<internal>"), alignment=128, addr_space=3)
        return llvm.AddressOfOp(self.pointer_type(self.shared_space), name).result

    def subgroup(self, k):
        return self.uniform(k.thread // self.lanes) if k.workgroup_size > self.lanes else 0

    def uniform(self, v: Value) -> Value:
        """The value, which is the same in all lanes of a wave, where the target keeps such values."""
        raise NotImplementedError

    def opaque(self, v: Value, uniform=False) -> Value:
        """An i32 as it is, but LLVM does not know what it is. uniform: the same in all lanes of a wave."""
        letter = self.uniform_register if uniform else self.register
        return Value(llvm.inline_asm(mlir_type(i32), [v.ssa], "", f"={letter},0"), i32)

    def read(self, name) -> Value:
        return Value(intrinsic(name, mlir_type(i32)), i32)

    # -- to assembly
    def lower(self, k) -> None:
        """Structured control flow and arithmetic become LLVM's dialect, in place. TraceError if a pass refuses."""
        with k.context:
            _run(k, LOWER)
            keep_loops(k.module)

    def assembly(self, k) -> str:
        """Assembly text of a lowered kernel; the module then holds that instead."""
        with k.context:
            _run(k, TO_ASSEMBLY)
            (binary,) = [op for op in k.module.body.operations if op.operation.name == "gpu.binary"]
            return gpu.ObjectAttr(ir.ArrayAttr(binary.attributes["objects"])[0]).object.decode().rstrip("\0")

    def described(self, k, source: dict | None, **more) -> dict:
        """A code object's `source`: what the kernel was traced from, the versions, and what the caller adds."""
        return {**k.source, "target": self.name, "mlir": mlir_version(), **more, **(source or {})}


class Clock:
    """Seconds of each step: `clock("name")` ends a step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step], self._last = now - self._last, now
