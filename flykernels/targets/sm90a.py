"""NVIDIA H200 (sm_90a): PTX from MLIR, and a cubin, checked and measured, where there is a ptxas.

What only this target has is beside it: `sm90a_barriers`, `sm90a_tma`, `sm90a_wgmma`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ..codeobject import CodeObject
from ..dtypes import DType, bf16, f4e2m1, f16, f32, i16, i32, i64
from ..lang.errors import TraceError
from ..lang.matrix import MatrixAtom
from ..lang.microscaling import power_of_two
from ..lang.values import Value, constant, mlir_type
from ..layout import Mode, ThreadValues
from ..mlir import intrinsic, ir, llvm
from . import sm90a_fp4, sm90a_fp8, sm90a_kept, sm90a_once
from .gpu import Clock, Gpu, GpuLimits


class AssemblerError(RuntimeError):
    """ptxas refused a kernel, or warns that it runs otherwise than written."""


class Sm90a(Gpu):
    """The target object: limits, matrix atoms, the instructions the language needs, and `compile`."""

    name, lanes, register, uniform_register = "sm90a", 32, "r", "r"
    module_target = '#nvvm.target<O=3, chip="sm_90a", features="+ptx84">'
    limits = GpuLimits(
        lanes=32,
        max_workgroup=1024,
        shared_bytes=227 * 1024,
        vector_bytes=16,
        banks=32,
        registers=512,
        wave_registers=255,
        register_step=8,
        max_waves=16,
        simds=4,
        compute_units=132,
        shared_read=128,
        shared_fill=64,
        latency=800,
        l2_bytes=50 << 20,  # an H200's and an H100's data sheet
    )
    shared_bytes, max_workgroup, vector_bytes = limits.shared_bytes, limits.max_workgroup, limits.vector_bytes
    held_bytes = 128  # registers a thread may give to one held row, in bytes
    scopes = MappingProxyType({"workgroup": "block", "device": "device"})  # LLVM's names
    packed_maximum = (bf16, f16)  # types of which one instruction compares two pairs, NaN or not
    packed_nan_maximum = packed_maximum  # those of which one instruction gives the greater of two pairs, or NaN,
    packed_magnitude = staticmethod(sm90a_fp4.magnitude)  # without their signs if need be
    narrower_for_small_floats = MappingProxyType({(f32, f4e2m1): bf16})  # FP4's arithmetic is on pairs of 16 bits
    rereads = True  # what a cache beside the unit holds comes sooner than a walk through selects (measured in top-k)
    once = sm90a_once  # accesses to what is moved but once
    kept = sm90a_kept  # stores of what is written piece by piece
    publishes_alone = True  # fences are cumulative over what a barrier ordered before them (PTX ISA, memory model)

    # mma.sync.m16n8k16: lane = 4 * row + pair of columns
    _lanes = (Mode(4, 1, 2), Mode(8, 0, 1))
    mma_bf16 = MatrixAtom(
        "llvm.nvvm.mma.m16n8k16.row.col.bf16",
        ThreadValues((16, 16), _lanes, Mode(2, 1, 1), (Mode(2, 1, 8), Mode(2, 0, 8))),
        ThreadValues((8, 16), _lanes, Mode(2, 1, 1), (Mode(2, 1, 8),)),
        ThreadValues((16, 8), _lanes, Mode(2, 1, 1), (Mode(2, 0, 8),)),
    )

    def mma(self, atom: MatrixAtom, a: list, b: list, d: list) -> list:
        """One mma.sync on the registers of a, b, d; what d becomes."""
        four = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
        out = intrinsic(atom.name, four, *(v.bitcast(i32) for v in a + b), *(v[i] for v in d for i in (0, 1)))
        one = lambda i: Value(llvm.extractvalue(mlir_type(f32), out, [i]), f32)
        return [one(2 * i).splat(2).insert(1, one(2 * i + 1)) for i in (0, 1)]

    def function_attributes(self, k):
        numbers = lambda *n: ir.DenseI32ArrayAttr.get(list(n))
        beside = getattr(k.of_target, "beside", 1)
        attributes = [
            ("nvvm.kernel", ir.UnitAttr.get()),
            ("nvvm.reqntid", numbers(k.workgroup_size)),
            ("nvvm.minctasm", ir.IntegerAttr.get(mlir_type(i32), beside)),
        ]
        return attributes + ([("nvvm.cluster_dim", numbers(k.cluster))] if k.cluster > 1 else [])

    def map_parameters(self, k):
        by_value = {
            "llvm.byval": ir.TypeAttr.get(ir.Type.parse(f"!llvm.array<{MAP_BYTES} x i8>")),
            "llvm.align": ir.IntegerAttr.get(mlir_type(i64), MAP_ALIGNMENT),
            "nvvm.grid_constant": ir.UnitAttr.get(),
        }
        return [(ir.Type.parse("!llvm.ptr"), ir.DictAttr.get(by_value)) for _ in k.tensor_maps]

    def shared_memory(self, k, name, size):
        """A pointer to `size` bytes of the workgroup's memory; one piece may be larger than STATIC_SHARED."""
        return self.dynamic_memory(k, size) if size > STATIC_SHARED else super().shared_memory(k, name, size)

    def dynamic_memory(self, k, size: int):
        """A pointer to `size` bytes of the workgroup's memory, aligned to 1024, that the launch asks for: more than the
        48 KiB that a kernel may have without. Once a kernel."""
        if size > self.limits.shared_bytes:
            raise TraceError(
                f"{size} bytes of shared memory; {self.name} has {self.limits.shared_bytes} a workgroup",
                "fewer stages or a smaller tile",
            )
        k.of_target.dynamic_bytes = size
        kind = ir.TypeAttr.get(ir.Type.parse("!llvm.array<0 x i8>"))
        with ir.InsertionPoint.at_block_begin(k.module.body.operations[0].regions[0].blocks[0]):
            llvm.GlobalOp(
                kind, "dynamic_memory", ir.Attribute.parse("#llvm.linkage<external>"), alignment=1024, addr_space=3
            )
        return llvm.AddressOfOp(self.pointer_type(self.shared_space), "dynamic_memory").result

    def thread(self, k):
        return self.read("llvm.nvvm.read.ptx.sreg.tid.x")

    def workgroup_id(self, k, axis):
        return self.read(f"llvm.nvvm.read.ptx.sreg.ctaid.{'xyz'[axis]}")

    def uniform(self, v):
        return v

    def barrier(self):
        intrinsic("llvm.nvvm.barrier.cta.sync.aligned.all", None, constant(0, i32))

    def barrier_count(self, condition: Value) -> Value:
        """A barrier, and the number of the workgroup's threads where condition holds."""
        name = "llvm.nvvm.barrier.cta.red.popc.aligned.all"
        return Value(intrinsic(name, mlir_type(i32), constant(0, i32), condition), i32)

    def over_lanes(self, k, kind: str, v: Value, lanes: int) -> Value:
        """redux.sync: the sum, greatest or least of 32-bit integers over aligned groups of `lanes` lanes."""
        name = "add" if kind == "add" else f"{'' if v.dtype.signed else 'u'}{kind}"
        mask = constant(-1, i32)
        if lanes < self.lanes:
            mask = constant((1 << lanes) - 1, i32) << (k.thread % self.lanes // lanes * lanes)
        return Value(intrinsic(f"llvm.nvvm.redux.sync.{name}", mlir_type(i32), v, mask), v.dtype)

    def exchange(self, k, v: Value, distance):
        """shfl.sync.bfly: this lane's value, and that of lane ^ distance."""
        bits = v.bitcast(i32)
        other = intrinsic(
            "llvm.nvvm.shfl.sync.bfly.i32",
            mlir_type(i32),
            constant(-1, i32),
            bits,
            constant(distance, i32),
            constant(31, i32),
        )
        return v, Value(other, i32).bitcast(v.dtype)

    def publish(self):
        """What this thread has stored in device memory may be read by others anywhere, once they `observe`."""
        llvm.fence(llvm.AtomicOrdering.acq_rel, syncscope="device")

    def observe(self):
        """From here on this thread reads what others have published."""
        llvm.fence(llvm.AtomicOrdering.acq_rel, syncscope="device")

    def count_up(self, pointer, by: int = 1) -> Value:
        """Adds to an i32 in device memory, one addition after the other on the whole device; what was there before."""
        got = llvm.atomicrmw(
            llvm.AtomicBinOp.add, pointer, constant(by, i32).ssa, llvm.AtomicOrdering.monotonic, syncscope="device"
        )
        return Value(got, i32)

    def small_float_factors(self, kind: DType, exponent: Value, dtype: DType, round_up: bool) -> tuple[Value, ...]:
        """See lang.microscaling.factors_for."""
        if kind == f16 and exponent.dtype == i16:
            if dtype == f4e2m1:
                return sm90a_fp4.factors_of_f16(exponent)
            if sm90a_fp8.takes_f16(dtype, round_up):
                return sm90a_fp8.factors_of_f16(exponent)
        factor = power_of_two(exponent)
        return (factor if kind == factor.dtype else factor.to(f32),)

    def first_factor_alone(self, kind: DType, exponent: Value, dtype: DType, round_up: bool) -> Value | None:
        """See lang.microscaling.first_factor_alone."""
        if kind == f16 and exponent.dtype == i16 and sm90a_fp8.takes_f16(dtype, round_up):
            return sm90a_fp8.first_alone(exponent)
        return None

    def small_floats(self, x: Value, factors: tuple[Value, ...], dtype: DType) -> Value | None:
        """See lang.microscaling.words."""
        alike = x.dtype == factors[0].dtype
        if dtype == f4e2m1 and x.dtype in sm90a_fp4.FLAT and alike and x.width % 8 == 0:
            return sm90a_fp4.along(x, factors)
        return sm90a_fp8.along(x, factors, dtype) if dtype in sm90a_fp8.FORMATS else None

    def small_floats_down(self, rows: list[Value], factors: tuple[Value, ...], dtype: DType) -> Iterable[Value] | None:
        """See lang.microscaling.words_down."""
        alike = rows[0].dtype == factors[0].dtype
        if dtype == f4e2m1 and rows[0].dtype in sm90a_fp4.FLAT and alike and len(rows) == 8:
            return sm90a_fp4.down(rows, factors)
        if alike and rows[0].dtype != f32 and dtype in sm90a_fp8.FORMATS:
            return sm90a_fp8.down(rows, factors, dtype)
        return None

    def compile(self, k, source: dict | None = None) -> CodeObject:
        """The traced kernel: a cubin and what ptxas says it costs, or PTX where there is no ptxas.

        PTX is compiled by the driver when it is loaded; registers, spills and shared_bytes are then not known (0).
        TraceError if the back end refuses it, AssemblerError if ptxas does."""
        clock = Clock()
        self.lower(k)
        clock("lower")
        text = self.assembly(k)
        clock("assembly")
        ptxas = find_ptxas()
        binary, cost = assembled(ptxas, k.name, text) if ptxas else (text.encode(), {})
        clock("ptxas")
        return CodeObject(
            target=self.name,
            features="sm_90a",
            entry=k.name,
            arguments=k.signature(),
            grid=k.grid,
            workspace=k.workspace,
            workgroup_size=k.workgroup_size,
            tensor_maps=k.tensor_maps,
            dynamic_bytes=getattr(k.of_target, "dynamic_bytes", 0),
            cluster=k.cluster,
            overlaps=k.overlaps,
            grid_most=k.grid_most,
            source=self.described(k, source, assembler=cost.pop("assembler", "the driver")),
            binary=binary,
            text=text,
            seconds=clock.seconds,
            **cost,
        )


@cache
def find_ptxas() -> str | None:
    """ptxas on PATH, or the one that comes with triton; None if there is neither."""
    found = importlib.util.find_spec("triton")
    beside = [Path(folder) / TRITONS for folder in (found.submodule_search_locations or [])] if found else []
    return shutil.which("ptxas") or next((str(p) for p in beside if p.is_file()), None)


def assembled(ptxas: str, name: str, text: str) -> tuple[bytes, dict]:
    """(cubin, what it costs as CodeObject's fields) of PTX. AssemblerError if ptxas cannot be run, ends early or
    refuses it, or if it says that wgmma was serialised (C75xx): right, but several times slower than written."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f, tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        f.write(text)
        f.flush()
        command = [ptxas, "-arch=sm_90a", "-v", "-o", out.name, f.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as e:
            raise AssemblerError(f"{ptxas} cannot be run: {e}. Put another ptxas on PATH") from e
        binary = out.read()
    log = done.stdout + done.stderr
    if done.returncode < 0 or not (done.returncode or binary):
        how = f"was ended by signal {-done.returncode}" if done.returncode else "wrote nothing"
        raise AssemblerError(f"{ptxas} {how} while it assembled {name}, perhaps for lack of memory or room. {log}")
    if done.returncode:
        raise AssemblerError(f"ptxas refused {name}: {log}")
    serialised = re.search(r".*C75\d\d.*", log)
    if serialised:
        raise AssemblerError(f"ptxas serialises wgmma in {name}: {serialised[0]}")
    said = lambda what: int((re.search(rf"(\d+) {what}", log) or [0, 0])[1])
    return binary, {
        "shared_bytes": said("bytes smem"),
        "registers": said("registers"),
        "spills": said("bytes spill stores") // REGISTER_BYTES,
        "scratch_bytes": said("bytes stack frame"),
        "assembler": _version(ptxas),
    }


@cache
def _version(ptxas: str) -> str:
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    return f"ptxas {(re.search(r'V([0-9.]+)', said) or ['', 'unknown'])[1]}"


TRITONS = Path("backends/nvidia/bin/ptxas")
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
REGISTER_BYTES = 4
STATIC_SHARED = 32 * 1024  # bytes: a larger piece is asked for at the launch (48 KiB is the most without)
sm90a = Sm90a()
