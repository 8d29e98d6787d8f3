"""AMD CDNA4 (MI350X, MI355X): from a traced kernel to a linked code object, on any machine.

Figures: AMD CDNA4 ISA manual; LLVM "User Guide for AMDGPU Backend"; HipKittens (arXiv 2511.08083) for the LDS. Rates
and latency (cycles) are read off published traces of MI350X kernels (github.com/jhinpan/flydsl-kernel-profiling)."""

from __future__ import annotations

from types import MappingProxyType

from ..codeobject import CodeObject
from ..dtypes import DType, bf16, f4e2m1, f8e4m3fn, f8e5m2, f16, f32, i1, i16, i32, i64
from ..lang.errors import located
from ..lang.matrix import MatrixAtom
from ..lang.values import Value, constant, maximum, minimum, mlir_type, vector_of
from ..layout import Mode, ThreadValues
from ..mlir import intrinsic, ir, llvm, rocdl
from . import amd_link, amd_metadata
from .gfx950_lanes import MOST_LOADS, compiler_fence, exchange, fence, waitcnt
from .gpu import Clock, Gpu, GpuLimits

BUFFER_FLAGS = 0x27000  # a raw buffer of 32-bit words, as LLVM's own descriptors for this family
BUFFER_MOST = 0xFFFFF000  # bytes a descriptor may span here: an offset from here on is outside every buffer


def _operand(rows: int, k: int, per_lane: int) -> ThreadValues:
    """Lane = row + rows * group of k, each with `per_lane` consecutive k."""
    return ThreadValues((rows, k), (Mode(rows, 0, 1), Mode(64 // rows, 1, per_lane)), Mode(per_lane, 1, 1))


# The instruction's own D has 4 rows a lane; with A and B exchanged it has 4 columns a lane, which is how C is stored.
_D16 = ThreadValues((16, 16), (Mode(16, 0, 1), Mode(4, 1, 4)), Mode(4, 1, 1))
_D32 = ThreadValues((32, 32), (Mode(32, 0, 1), Mode(2, 1, 4)), Mode(4, 1, 1), (Mode(4, 1, 8),))


def _atom(name: str, rows: int, k: int, d: ThreadValues, cycles: int) -> MatrixAtom:
    return MatrixAtom(f"llvm.amdgcn.mfma.f32.{name}", _operand(rows, k, 8), _operand(rows, k, 8), d, cycles=cycles)


SCALED_FORMATS = MappingProxyType({f8e4m3fn: 0, f8e5m2: 1, f4e2m1: 4})  # MFMA's codes (cbsz, blgp)
NO_SCALE = 127  # E8M0 of 1


def _scaled_operand(dtype: DType, rows: int, k: int) -> ThreadValues:
    """Bytes of a scaled instruction's operand. FP4: a lane holds 32 consecutive numbers. FP8: two runs of 16, so that a
    group of lanes holds 16 consecutive numbers of each half of K."""
    groups = 64 // rows
    if dtype == f4e2m1:
        return _operand(rows, k // 2, 16)
    return ThreadValues((rows, k), (Mode(rows, 0, 1), Mode(groups, 1, 16)), Mode(16, 1, 1), (Mode(2, 1, 16 * groups),))


def _scaled(a: DType, b: DType, rows: int, k: int) -> MatrixAtom:
    """The scale of block i of 32 numbers along K is held by group i of lanes. Cycles: rocm-libraries, origami's table;
    FP8 on one side sets the pace."""
    groups, slow = 64 // rows, 1 if a == b == f4e2m1 else 2
    return MatrixAtom(
        f"llvm.amdgcn.mfma.scale.f32.{rows}x{rows}x{k}.f8f6f4",
        _scaled_operand(a, rows, k),
        _scaled_operand(b, rows, k),
        _D16 if rows == 16 else _D32,
        scale=ThreadValues((rows, groups), (Mode(rows, 0, 1), Mode(groups, 1, 1)), Mode(1, 1, 1)),
        cycles=rows * slow,
        formats=(SCALED_FORMATS[a], SCALED_FORMATS[b]),
    )


class Gfx950(Gpu):
    """The target object: limits, matrix atoms, the instructions the language needs, and `compile`."""

    name, lanes, register, uniform_register = "gfx950", 64, "v", "s"
    # LLVM would count on wide accesses at any address, which the driver may allow or not; so it is told not to.
    module_target = '#rocdl.target<O=3, chip="gfx950", features="-unaligned-access-mode">'
    limits = GpuLimits(
        lanes=64,
        max_workgroup=1024,
        shared_bytes=160 * 1024,
        vector_bytes=16,
        banks=64,
        registers=512,
        wave_registers=512,
        register_step=8,
        max_waves=8,
        simds=4,
        compute_units=256,
        dies=8,
        shared_read=256,
        shared_fill=64,
        latency=1950,
    )
    shared_bytes, max_workgroup = limits.shared_bytes, limits.max_workgroup
    vector_bytes, banks = limits.vector_bytes, limits.banks
    held_bytes = 128  # registers a thread may give to one held row, in bytes
    scopes = MappingProxyType({"workgroup": "workgroup", "device": "agent"})  # LLVM's names
    rereads = False  # an element that registers hold is not read from memory again: loads are of 16 bytes
    packed_nan_maximum = ()
    packed_maximum = (f16,)  # types of which one instruction compares two pairs, NaN or not

    # Lanes that one turn of an LDS read serves together: the orders in which it may be (which one it is, only the
    # hardware can say; "published" is HipKittens'). A swizzle should be free of conflicts in all of them.
    read_phases = MappingProxyType(
        {
            "published": [[*range(b, b + 4), *range(b + 12, b + 16), *range(b + 20, b + 28)] for b in (0, 32)]
            + [[*range(b + 4, b + 12), *range(b + 16, b + 20), *range(b + 28, b + 32)] for b in (0, 32)],
            "in order": [list(range(b, b + 16)) for b in range(0, 64, 16)],
        }
    )
    read_phases_8_bytes = ([*range(32)], [*range(32, 64)])  # of reads of 8 bytes a lane, in order
    write_phases_8_bytes, write_banks = tuple([*range(b, b + 16)] for b in range(0, 64, 16)), 32  # probed

    # Matrix instructions by element type and shape (rows x columns x k)
    atoms = MappingProxyType(
        {
            (bf16, "16x16x32"): _atom("16x16x32.bf16", 16, 32, _D16, 16),
            (f16, "16x16x32"): _atom("16x16x32.f16", 16, 32, _D16, 16),
            (bf16, "32x32x16"): _atom("32x32x16.bf16", 32, 16, _D32, 32),
            (f16, "32x32x16"): _atom("32x32x16.f16", 32, 16, _D32, 32),
        }
    )
    mma_bf16 = atoms[bf16, "16x16x32"]
    mma_f16 = atoms[f16, "16x16x32"]

    # Scaled matrix instructions by the types of A and B and shape: `a` and `b` are bytes here
    scaled_atoms = MappingProxyType(
        {
            (a, b, f"{rows}x{rows}x{k}"): _scaled(a, b, rows, k)
            for a in SCALED_FORMATS
            for b in SCALED_FORMATS
            for rows, k in ((16, 128), (32, 64))
        }
    )
    mma_mxfp4 = scaled_atoms[f4e2m1, f4e2m1, "16x16x128"]

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

    def exchange(self, k, v: Value, distance: int):
        return exchange(v, distance)

    def exp2(self, v: Value) -> Value:
        """v_exp_f32, element by element: LLVM's own exp2 would spend four more instructions on subnormal results."""
        one = lambda x: Value(intrinsic("llvm.amdgcn.exp2.f32", mlir_type(f32), x.to(f32)), f32).to(v.dtype)
        if v.width is None:
            return one(v)
        out = v
        for i in range(v.width):
            out = out.insert(i, one(v[i]))
        return out

    def whole(self, v: Value) -> Value:
        """A 64-bit integer as it is, of which LLVM takes no half: a read of neighbours from LDS stays one of 8 bytes a
        lane, as halves of them would be in every second bank."""
        return Value(llvm.inline_asm(mlir_type(v.dtype), [v.ssa], "", "=v,0"), v.dtype)

    # -- waits and barriers
    def barrier(self):
        """This wave's LDS operations are done; then all waves meet. Loads from memory stay in flight: wait_loads."""
        compiler_fence("release")
        rocdl.s_waitcnt(waitcnt(lds=0))
        rocdl.s_barrier()
        compiler_fence("acquire")

    def wait_loads(self, keep_in_flight: int):
        """All but this wave's `keep_in_flight` youngest loads from memory have arrived."""
        rocdl.s_waitcnt(waitcnt(memory=min(keep_in_flight, MOST_LOADS - 1)))
        compiler_fence("acquire")

    def pin(self):
        """Nothing is scheduled across this point."""
        intrinsic("llvm.amdgcn.sched.barrier", None, constant(0, i32))

    def priority(self, level: int):
        intrinsic("llvm.amdgcn.s.setprio", None, constant(level, i16))

    def publish(self):
        """What this wave has stored in device memory may be read by waves of any compute unit, once they `observe`."""
        fence("release")

    def observe(self):
        """From here on this wave reads what other compute units have published."""
        fence("acquire")

    def count_up(self, pointer, by: int | Value = 1) -> Value:
        """Adds to an i32 in device memory, one addition after the other on the whole device; what was there before."""
        by = by if isinstance(by, Value) else constant(by, i32)
        got = llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, by.ssa, llvm.AtomicOrdering.monotonic, syncscope="agent")
        return Value(got, i32)

    # -- matrix
    def mma(self, atom: MatrixAtom, a: list, b: list, d: list, scale_a=None, scale_b=None, place: int = 0) -> list:
        """One matrix instruction on the registers of a, b, d; what d becomes. A and B change places: see _D16.

        place: the byte of the scales' registers that is taken."""
        n = lambda x: constant(x, i32)
        width = sum(v.width for v in d)
        whole = d[0] if len(d) == 1 else join(d)
        if atom.scale:
            packed = lambda parts: join([v.bitcast(i32, v.width // 4) for v in parts])
            one = lambda scale: n(NO_SCALE) if scale is None else scale.to(i32)[0]
            kinds = [n(code) for code in atom.formats[::-1]]
            operands = [packed(b), packed(a), whole, *kinds, n(place), one(scale_b), n(place), one(scale_a)]
        else:
            operands = [b[0], a[0], whole, n(0), n(0), n(0)]
        out = Value(intrinsic(atom.name, mlir_type(f32, width), *operands), f32, width)
        if len(d) == 1:
            return [out]
        each = d[0].width
        return [out.shuffle(range(i, i + each)) for i in range(0, width, each)]

    def small_floats(self, x: Value, factors: tuple[Value, ...], dtype: DType) -> Value | None:
        """x times a power of two -> words of FP8 or FP4 codes, two an instruction. See lang.microscaling.words.

        What FP8 cannot hold becomes the largest number by a clamp: what the conversion itself does with it depends on
        the wave's mode register (FP16_OVFL)."""
        kind = {f8e4m3fn: "fp8", f8e5m2: "bf8", f4e2m1: "fp4"}.get(dtype)
        if kind is None:
            return None
        (factor,) = factors
        x = x.to(f32) * factor.to(f32)
        if dtype != f4e2m1:
            x = minimum(maximum(x, -dtype.largest), dtype.largest)
        one, half = constant(1.0, f32), mlir_type(i16, 2)
        name, each, found = f"llvm.amdgcn.cvt.scalef32.pk.{kind}.f32", 32 // dtype.bits, []
        for first in range(0, x.width, each):
            word = constant(0, i32) if dtype == f4e2m1 else constant(0, i16, 2)
            for i in range(0, each, 2):
                place = constant(i // 2, i32) if dtype == f4e2m1 else constant(i // 2, i1)
                kept = mlir_type(i32) if dtype == f4e2m1 else half
                got = intrinsic(name, kept, word, x[first + i], x[first + i + 1], one, place)
                word = Value(got, word.dtype, word.width)
            found.append(word if dtype == f4e2m1 else word.bitcast(i32))
        return vector_of(found)

    # -- memory that is not a pointer: buffers, LDS
    def buffer(self, pointer, size_bytes):
        """A buffer descriptor of size_bytes (int or i64 Value, below 4 GiB): reads beyond give zeros."""
        size = size_bytes if isinstance(size_bytes, Value) else constant(size_bytes, i64)
        return rocdl.make_buffer_rsrc(
            self.pointer_type(8), pointer, constant(0, i16).ssa, size.to(i64).ssa, constant(BUFFER_FLAGS, i32).ssa
        )

    def load_buffer(self, buffer, lane_bytes: Value, uniform_bytes, dtype: DType, width=None) -> Value:
        """buffer[lane_bytes + uniform_bytes] into registers; zeros where the first byte lies outside."""
        offset = uniform_bytes if isinstance(uniform_bytes, Value) else constant(uniform_bytes, i32)
        zero = ir.IntegerAttr.get(mlir_type(i32), 0)
        got = rocdl.raw_ptr_buffer_load(mlir_type(dtype, width), buffer, lane_bytes.ssa, offset.ssa, aux=zero)
        return Value(got, dtype, width)

    def alias_scope(self, k):
        """The mark of direct-to-LDS loads: LDS reads that disclaim it need no vmcnt(0) from the compiler."""

        def make():
            domain = "#llvm.alias_scope_domain<id = distinct[0]<>>"
            return ir.ArrayAttr.get([ir.Attribute.parse(f"#llvm.alias_scope<id = distinct[1]<>, domain = {domain}>")])

        return k.once("direct to LDS", make)

    def load_to_shared(self, buffer, shared_pointer, lane_bytes: Value, uniform_bytes, scope, size: int = 16):
        """`size` (4 or 16) bytes a lane: memory[lane_bytes + uniform_bytes] -> LDS[shared_pointer + size * lane].

        No registers are used; lanes whose offset lies outside the buffer write zeros. Counted by wait_loads."""
        offset = uniform_bytes if isinstance(uniform_bytes, Value) else constant(uniform_bytes, i32)
        rocdl.raw_ptr_buffer_load_lds(
            buffer,
            shared_pointer,
            constant(size, i32).ssa,
            lane_bytes.ssa,
            offset.ssa,
            constant(0, i32).ssa,
            aux=ir.IntegerAttr.get(mlir_type(i32), 0),
            alias_scopes=scope,
        )

    def read_transposed(self, pointer, dtype: DType, scope) -> Value:
        """4 elements of 16 bits a lane, transposed in groups of 16 lanes (ds_read_b64_tr_b16). All lanes must be on.

        Lane i of a group addresses 4 neighbours of row i // 4, columns 4 * (i % 4) and on, of a 4 x 16 tile, and gets
        the tile's column i."""
        kind = mlir_type(dtype, 4)
        return Value(rocdl.ds_read_tr16_b64_(kind, pointer, noalias_scopes=scope), dtype, 4)

    # -- to code
    def compile(self, k, source: dict | None = None) -> CodeObject:
        """The traced kernel as a linked code object, with what it costs read back from its metadata.

        TraceError if the back end refuses it, LinkerMissing if this machine cannot link."""
        clock = Clock()
        self.lower(k)
        clock("lower")
        with k.context, ir.Location.unknown():
            linked_by = amd_link.linker()
            spare = k.module.operation.clone() if amd_link.find_lld() else None
            text = self.assembly(k)
            clock("assembly")
            try:
                binary = amd_link.link(spare, text, self.name)
            except ir.MLIRError as e:
                raise located(e, k.name) from e
        clock("link")
        (cost,) = [n for n in amd_metadata.kernels(binary) if n[".name"] == k.name]
        return CodeObject(
            target=self.name,
            features=self.name,
            entry=k.name,
            arguments=k.signature(),
            grid=k.grid,
            workspace=k.workspace,
            workgroup_size=k.workgroup_size,
            shared_bytes=cost[".group_segment_fixed_size"],
            registers=cost[".vgpr_count"],
            agprs=cost.get(".agpr_count", 0),
            sgprs=cost[".sgpr_count"],
            spills=cost[".vgpr_spill_count"] + cost[".sgpr_spill_count"],
            scratch_bytes=cost[".private_segment_fixed_size"],
            source=self.described(k, source, linker=linked_by),
            binary=binary,
            text=text,
            seconds=clock.seconds,
        )


def join(parts: list[Value]) -> Value:
    """Vectors of one width, end to end (their number a power of two)."""
    while len(parts) > 1:
        n = 2 * parts[0].width
        parts = [a.shuffle(range(n), b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


gfx950 = Gfx950()
