"""NVIDIA H200 (sm_90a): PTX from MLIR, checked and measured by ptxas."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile

from ..codeobject import CodeObject
from ..dtypes import DType, bf16, f4e2m1, f8e4m3fn, f8e5m2, f32, i16, i32
from ..lang.matrix import MatrixAtom
from ..lang.values import Value, constant, mlir_type, vector_of
from ..layout import Mode, ThreadValues
from ..mlir import intrinsic, ir, llvm
from . import sm90a_fp4
from .gpu import Clock, Gpu, GpuLimits


class AssemblerMissing(RuntimeError):
    """No ptxas on this machine."""


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
    )
    shared_bytes, max_workgroup, vector_bytes = limits.shared_bytes, limits.max_workgroup, limits.vector_bytes
    held_bytes = 128  # registers a thread may give to one held row, in bytes

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
        beside = getattr(k.of_target, "beside", 1)  # workgroups that shall fit on a multiprocessor: bounds registers
        return [
            ("nvvm.kernel", ir.UnitAttr.get()),
            ("nvvm.reqntid", ir.DenseI32ArrayAttr.get([k.workgroup_size])),
            ("nvvm.minctasm", ir.IntegerAttr.get(mlir_type(i32), beside)),
        ]

    def thread(self, k):
        return self.read("llvm.nvvm.read.ptx.sreg.tid.x")

    def workgroup_id(self, k, axis):
        return self.read(f"llvm.nvvm.read.ptx.sreg.ctaid.{'xyz'[axis]}")

    def uniform(self, v):
        return v

    def barrier(self):
        intrinsic("llvm.nvvm.barrier.cta.sync.aligned.all", None, constant(0, i32))

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

    def small_floats(self, x: Value, factor: Value, dtype: DType) -> Value | None:
        """x times a power of two -> words of FP8 codes, two an instruction (it saturates); bf16 to FP4 by arithmetic on
        pairs of 16 bits. See lang.microscaling.words."""
        if dtype == f4e2m1 and x.dtype == bf16 and x.width % 8 == 0:
            return sm90a_fp4.from_bf16(x, factor)
        kind = {f8e4m3fn: "e4m3x2", f8e5m2: "e5m2x2"}.get(dtype)
        if kind is None:
            return None
        x = x.to(f32) * factor
        pair = lambda i: Value(intrinsic(f"llvm.nvvm.ff.to.{kind}.rn", mlir_type(i16), x[i + 1], x[i]), i16)
        pairs = vector_of([pair(i) for i in range(0, x.width, 2)])
        return pairs.bitcast(i32, x.width // 4)

    def compile(self, k, source: dict | None = None) -> CodeObject:
        """The traced kernel as a cubin, with what ptxas says it costs; its text is PTX.

        TraceError if the back end refuses it, AssemblerMissing if there is no ptxas on PATH."""
        clock = Clock()
        self.lower(k)
        clock("lower")
        text = self.assembly(k)
        clock("assembly")
        ptxas = shutil.which("ptxas")
        if ptxas is None:
            raise AssemblerMissing(
                f"{k.name}: making a cubin for sm_90a needs ptxas, and none is on PATH. Do: install the CUDA toolkit, "
                "or pip install nvidia-cuda-nvcc and put its bin folder on PATH"
            )
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f, tempfile.NamedTemporaryFile(suffix=".cubin") as out:
            f.write(text)
            f.flush()
            command = [ptxas, "-arch=sm_90a", "-v", "-o", out.name, f.name]
            done = subprocess.run(command, capture_output=True, text=True)
            binary = out.read()
        if done.returncode:
            raise RuntimeError(f"ptxas refused {k.name}: {done.stderr}")
        clock("ptxas")
        said = lambda what: int((re.search(rf"(\d+) {what}", done.stderr) or [0, 0])[1])
        return CodeObject(
            target=self.name,
            features="sm_90a",
            entry=k.name,
            arguments=k.signature(),
            grid=k.grid,
            workgroup_size=k.workgroup_size,
            shared_bytes=said("bytes smem"),
            registers=said("registers"),
            spills=said("bytes spill stores") // REGISTER_BYTES,
            scratch_bytes=said("bytes stack frame"),
            source=self.described(k, source),
            binary=binary,
            text=text,
            seconds=clock.seconds,
        )


REGISTER_BYTES = 4
sm90a = Sm90a()
