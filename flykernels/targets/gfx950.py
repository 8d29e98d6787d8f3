"""AMD CDNA4 (MI350X, MI355X): assembly from MLIR, code object through Triton's assembler and linker."""

from __future__ import annotations

import os
import re
import tempfile
import time

from ..dtypes import i1, i16, i32, i64
from ..lang.matrix import MatrixAtom
from ..lang.values import Value, constant, mlir_type
from ..layout import Mode, ThreadValues
from ..mlir import intrinsic, ir, llvm, rocdl
from .gpu import Code, Gpu


def _operand(rows, k, per_lane):  # lane = row + rows * k-group, each 8 or so consecutive k
    return ThreadValues((rows, k), (Mode(rows, 0, 1), Mode(64 // rows, 1, per_lane)), Mode(per_lane, 1, 1))


class Gfx950(Gpu):
    name, lanes = "gfx950", 64
    module_target = '#rocdl.target<O=3, chip="gfx950">'
    shared_bytes, max_workgroup, vector_bytes = 160 * 1024, 1024, 16
    held_bytes = 128  # registers a thread may give to one held row, in bytes
    banks = 64  # of 4 bytes
    # Lanes that one ds_read_b128 turn serves together. "published": HipKittens (arXiv 2511.08083) as remembered, unverified.
    read_phases = {
        "published": [[*range(b, b + 4), *range(b + 12, b + 16), *range(b + 20, b + 28)] for b in (0, 32)]
        + [[*range(b + 4, b + 12), *range(b + 16, b + 20), *range(b + 28, b + 32)] for b in (0, 32)],
        "in order": [list(range(b, b + 16)) for b in range(0, 64, 16)],
    }

    # The instruction's own D has 4 rows a lane; with A and B exchanged it has 4 columns a lane, which is how C is stored.
    mma_bf16 = MatrixAtom(
        "llvm.amdgcn.mfma.f32.16x16x32.bf16",
        _operand(16, 32, 8),
        _operand(16, 32, 8),
        ThreadValues((16, 16), (Mode(16, 0, 1), Mode(4, 1, 4)), Mode(4, 1, 1)),
    )

    # Four-bit floats, two a byte: `a` and `b` are bytes here. 32 consecutive values a lane share the lane's scale.
    mma_mxfp4 = MatrixAtom(
        "llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4",
        _operand(16, 64, 16),
        _operand(16, 64, 16),
        mma_bf16.d,
        scale=ThreadValues((16, 4), (Mode(16, 0, 1), Mode(4, 1, 1)), Mode(1, 1, 1)),
    )

    def function_attributes(self, k):
        return [
            ("rocdl.kernel", ir.UnitAttr.get()),
            ("gpu.kernel", ir.UnitAttr.get()),
            ("rocdl.flat_work_group_size", ir.StringAttr.get(f"{k.workgroup_size},{k.workgroup_size}")),
        ]

    # -- who am I
    def thread(self, k):
        return self.read("llvm.amdgcn.workitem.id.x")

    def workgroup_id(self, k, axis):
        return self.read(f"llvm.amdgcn.workgroup.id.{'xyz'[axis]}")

    def uniform(self, v):
        return Value(rocdl.readfirstlane(mlir_type(i32), v.ssa), i32)

    # -- lanes: all in the vector ALU, none through LDS
    def exchange(self, k, v: Value, distance):
        bits = v.bitcast(i32)
        if distance >= 16:  # swaps halves of rows between two copies of the register
            pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
            both = intrinsic(f"llvm.amdgcn.permlane{distance}.swap", pair, bits, bits, constant(0, i1), constant(0, i1))
            half = lambda i: Value(llvm.extractvalue(mlir_type(i32), both, [i]), i32).bitcast(v.dtype)
            return half(0), half(1)
        other = bits
        for control in DPP_XOR[distance]:
            other = Value(rocdl.update_dpp(mlir_type(i32), other.ssa, other.ssa, control, 0xF, 0xF, True), i32)
        return v, other.bitcast(v.dtype)

    # -- waits and barriers
    def barrier(self):
        """This wave's LDS operations are done; then all waves meet. Loads from memory stay in flight: see wait_loads."""
        compiler_fence("release")
        rocdl.s_waitcnt(waitcnt(lds=0))
        rocdl.s_barrier()
        compiler_fence("acquire")

    def wait_loads(self, keep_in_flight):
        """All but this wave's `keep_in_flight` youngest loads from memory have arrived."""
        rocdl.s_waitcnt(waitcnt(memory=keep_in_flight))
        compiler_fence("acquire")

    def pin(self):
        intrinsic("llvm.amdgcn.sched.barrier", None, constant(0, i32))

    def priority(self, level):
        intrinsic("llvm.amdgcn.s.setprio", None, constant(level, i16))

    # -- matrix
    def mma(self, atom: MatrixAtom, a: list, b: list, d: list, scale_a: Value = None, scale_b: Value = None) -> list:
        """One matrix instruction on the registers of a, b, d; what d becomes. A and B change places: see mma_bf16."""
        n = lambda x: constant(x, i32)
        if atom.scale:
            fp4, packed = n(4), lambda v: v.bitcast(i32, 4)
            operands = [packed(b[0]), packed(a[0]), d[0], fp4, fp4, n(0), scale_b.to(i32)[0], n(0), scale_a.to(i32)[0]]
        else:
            operands = [b[0], a[0], d[0], n(0), n(0), n(0)]
        return [Value(intrinsic(atom.name, d[0].ssa.type, *operands), d[0].dtype, d[0].width)]

    # -- direct to LDS
    def buffer(self, pointer, size_bytes):
        """A buffer descriptor: reads beyond size_bytes give zeros."""
        return rocdl.make_buffer_rsrc(
            self.pointer_type(8),
            pointer,
            constant(0, i16).ssa,
            constant(size_bytes, i64).ssa,
            constant(0x27000, i32).ssa,
        )

    def alias_scope(self, k):
        """The mark of direct-to-LDS loads: LDS reads that disclaim it need no vmcnt(0) from the compiler."""

        def make():
            domain = "#llvm.alias_scope_domain<id = distinct[0]<>>"
            return ir.ArrayAttr.get([ir.Attribute.parse(f"#llvm.alias_scope<id = distinct[1]<>, domain = {domain}>")])

        return k.once("direct to LDS", make)

    def load_to_shared(self, buffer, shared_pointer, lane_bytes: Value, uniform_bytes, scope):
        """16 bytes a lane: memory[lane_bytes + uniform_bytes] -> LDS[shared_pointer + 16 * lane], no registers used."""
        if isinstance(uniform_bytes, int):
            uniform_bytes = constant(uniform_bytes, i32)
        rocdl.raw_ptr_buffer_load_lds(
            buffer,
            shared_pointer,
            constant(16, i32).ssa,
            lane_bytes.ssa,
            uniform_bytes.ssa,
            constant(0, i32).ssa,
            aux=ir.IntegerAttr.get(mlir_type(i32), 0),
            alias_scopes=scope,
        )

    # -- to code
    def compile(self, k) -> Code:
        code = self.assembly(k)
        number = lambda what: int(re.search(rf"\.{what}:\s+(\d+)", code.text)[1])
        code.registers, code.agprs, code.sgprs = number("vgpr_count"), number("agpr_count"), number("sgpr_count")
        code.spills, code.shared = (
            number("vgpr_spill_count") + number("sgpr_spill_count"),
            number("group_segment_fixed_size"),
        )
        return code

    def link(self, code: Code) -> Code:
        """Assembly -> code object (hsaco)."""
        from triton._C.libtriton import amd
        from triton.backends.amd.compiler import assemble_amdgcn

        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as d:
            o, so = os.path.join(d, "k.o"), os.path.join(d, "k.hsaco")
            open(o, "wb").write(assemble_amdgcn(code.text, "gfx950", ""))
            amd.link_hsaco(o, so)
            code.binary = open(so, "rb").read()
        code.seconds["link"] = time.perf_counter() - start
        return code


# lane -> lane ^ d as one or two data-parallel-primitive controls
QUAD = lambda *p: sum(x << 2 * i for i, x in enumerate(p))
ROW_HALF_MIRROR, ROW_ROTATE = 0x141, 0x120
DPP_XOR = {1: [QUAD(1, 0, 3, 2)], 2: [QUAD(2, 3, 0, 1)], 4: [ROW_HALF_MIRROR, QUAD(3, 2, 1, 0)], 8: [ROW_ROTATE + 8]}


def waitcnt(memory=63, lds=15):
    """s_waitcnt's operand: wait until at most so many operations are in flight (63, 15: do not wait)."""
    return (memory & 15) | 7 << 4 | lds << 8 | (memory >> 4) << 14


def compiler_fence(ordering):
    """Keeps the compiler from moving memory operations across; no instruction comes of it (one wave is in order)."""
    llvm.fence(
        ir.IntegerAttr.get(ir.IntegerType.get_signless(64), {"acquire": 4, "release": 5}[ordering]),
        syncscope="wavefront",
    )


gfx950 = Gfx950()
