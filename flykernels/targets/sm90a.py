"""NVIDIA H200 (sm_90a): PTX from MLIR, checked and measured by ptxas."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time

from ..dtypes import f32, i32
from ..lang.matrix import MatrixAtom
from ..lang.values import Value, constant, mlir_type
from ..layout import Mode, ThreadValues
from ..mlir import intrinsic, ir, llvm
from .gpu import Code, Gpu


class Sm90a(Gpu):
    name, lanes = "sm90a", 32
    module_target = '#nvvm.target<O=3, chip="sm_90a", features="+ptx84">'
    shared_bytes, max_workgroup, vector_bytes = 227 * 1024, 1024, 16
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
        return [("nvvm.kernel", ir.UnitAttr.get()), ("nvvm.reqntid", ir.DenseI32ArrayAttr.get([k.workgroup_size]))]

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

    def compile(self, k) -> Code:
        code = self.assembly(k)
        start = time.perf_counter()
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f, tempfile.NamedTemporaryFile(suffix=".cubin") as out:
            f.write(code.text)
            f.flush()
            done = subprocess.run(
                ["ptxas", "-arch=sm_90a", "-v", "-o", out.name, f.name], capture_output=True, text=True
            )
            code.binary = out.read()
        if done.returncode:
            raise RuntimeError(f"ptxas refused {k.name}: {done.stderr}")
        number = lambda what: int((re.search(rf"(\d+) {what}", done.stderr) or [0, 0])[1])
        code.registers, code.spills = number("registers"), number("bytes spill stores")
        code.seconds["ptxas"] = time.perf_counter() - start
        return code


sm90a = Sm90a()
