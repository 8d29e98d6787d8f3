"""wgmma on sm_90a: a warpgroup multiplies tiles that lie in shared memory, asynchronously, into its registers.

Shapes, fragments and descriptors: PTX ISA 8.4, "Asynchronous Warpgroup Level Matrix Instructions"."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import DType, bf16, f16, f32, i32, i64
from ..lang.fragment import Fragment
from ..lang.values import Value, constant, mlir_type
from ..layout import Mode, ThreadValues
from ..mlir import llvm
from .sm90a_nvvm import nvvm, struct

WARPGROUP = 128  # threads
ROWS, DEPTH = 64, 16  # M and K (16-bit elements) of one instruction
COLUMNS_STEP, COLUMNS_MOST = 8, 256  # its N
SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}  # bits 62 and 63 of a descriptor
GROUP = 8  # rows of K, or of M and N, that a swizzle pattern spans
ADDRESS_BITS = (1 << 18) - 1  # of a shared-memory address, in a descriptor
UNIT = 16  # bytes that addresses and offsets in a descriptor count
TYPES = {bf16: "bf16", f16: "f16"}


@dataclass(frozen=True)
class SharedOperand:
    """How an operand's tile of a stage lies in shared memory, as TMA left it.

    rows     of M or N that are loaded
    depth    K of a stage
    along_k  its contiguous axis is K: boxes of (rows, `swizzle` bytes of K), one after the other along K; else it is M
             or N: boxes of (depth, `swizzle` bytes of M or N), one after the other along M or N
    swizzle  bytes of a box's row, and the swizzle's width: 128, 64 or 32"""

    rows: int
    depth: int
    along_k: bool
    swizzle: int
    dtype: DType

    @property
    def row(self) -> int:
        """Elements of a box's row."""
        return self.swizzle // self.dtype.bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.depth * self.dtype.bytes

    @property
    def alignment(self) -> int:
        """Bytes after which the swizzle's pattern repeats: where a stage may begin."""
        return GROUP * self.swizzle

    @property
    def boxes(self) -> int:
        return (self.depth if self.along_k else self.rows) // self.row

    @property
    def box_bytes(self) -> int:
        return self.bytes // self.boxes

    def descriptor_bits(self) -> int:
        """A descriptor without its address.

        Bits 16-29: bytes / 16 from one box to the next along M or N (unused along K with a swizzle, then 1); 32-45:
        from one group of 8 rows of a box to the next; 62-63: the swizzle."""
        leading = 1 if self.along_k else self.box_bytes // UNIT
        return leading << 16 | (GROUP * self.swizzle // UNIT) << 32 | SWIZZLE_CODE[self.swizzle] << 62

    def step_bytes(self, row: int, k: int) -> int:
        """Bytes from the tile's start to (row, k): rows in whole groups or boxes, k in whole instructions."""
        if self.along_k:
            box, inside = divmod(k, self.row)
            return box * self.box_bytes + row * self.swizzle + inside * self.dtype.bytes
        box, inside = divmod(row, self.row)
        return box * self.box_bytes + k * self.swizzle + inside * self.dtype.bytes


def descriptor(operand: SharedOperand, address: Value) -> Value:
    """The descriptor of a tile at a shared-memory address (an i32 of bytes).

    In a cluster an address says in its high bits whose memory it is; a descriptor has no room for that."""
    return ((address & ADDRESS_BITS) >> 4).to(i64) | _signed(operand.descriptor_bits())


def moved(descriptor: Value, size: int) -> Value:
    """The descriptor of what lies `size` bytes further on."""
    return descriptor + size // UNIT


def address_of(pointer) -> Value:
    """A shared-memory pointer as an i32 of bytes."""
    return Value(llvm.ptrtoint(mlir_type(i32), pointer), i32)


def sums_layout(columns: int, blocks: int, groups: tuple[int, int]) -> ThreadValues:
    """Who holds what of D: warpgroups side by side along (M, N), each with `blocks` x 64 rows and `columns` columns.

    A warp has 16 rows of 64; a lane two neighbours in rows lane / 4 and lane / 4 + 8 of each 8 columns."""
    return ThreadValues(
        (ROWS * blocks * groups[0], columns * groups[1]),
        (Mode(4, 1, 2), Mode(8, 0, 1), Mode(4, 0, 16), Mode(groups[0], 0, ROWS * blocks), Mode(groups[1], 1, columns)),
        Mode(2, 1, 1),
        (Mode(2, 0, 8), Mode(columns // 8, 1, 8), Mode(blocks, 0, ROWS)),
    )


def undefined(columns: int) -> Value:
    """Sums of 64 x columns that the first instruction overwrites. A `width` of f32 registers, in LLVM a struct."""
    count = ROWS * columns // WARPGROUP
    return Value(llvm.mlir_undef(struct(f32, count)), f32, count)


def zeros(columns: int) -> Value:
    """Sums of 64 x columns that are 0, as `undefined` gives them."""
    count = ROWS * columns // WARPGROUP
    return Value(llvm.ZeroOp(struct(f32, count)).result, f32, count)


def multiply(a: Value, b: Value, sums: Value, A: SharedOperand, B: SharedOperand, fresh: bool) -> Value:
    """sums + A B^T of 64 x columns x 16 (fresh: A B^T alone), started; a, b: descriptors. See `commit` and `wait`."""
    columns = sums.width * WARPGROUP // ROWS
    kind = f"#nvvm.wgmma_type<{TYPES[A.dtype]}>"
    layout = lambda first: f"#nvvm.mma_layout<{'row' if first else 'col'}>"
    out = nvvm(
        "wgmma.mma_async", sums, a, b, result=sums.ssa.type,
        shape=f"#nvvm.shape<m = {ROWS}, n = {columns}, k = {DEPTH}>", typeA=kind, typeB=kind,
        typeD="#nvvm.wgmma_type<f32>", scaleD=f"#nvvm.wgmma_scale_out<{'zero' if fresh else 'one'}>",
        scaleA="#nvvm.wgmma_scale_in<one>", scaleB="#nvvm.wgmma_scale_in<one>",
        layoutA=layout(A.along_k), layoutB=layout(not B.along_k),
    )  # fmt: skip
    return Value(out, f32, sums.width)


def fence() -> None:
    """Registers that wgmma is about to use are settled. Before the first of a batch."""
    nvvm("wgmma.fence.aligned")


def commit() -> None:
    """The instructions since the last time are one group."""
    nvvm("wgmma.commit.group.sync.aligned")


def wait(in_flight: int) -> None:
    """Until all but the `in_flight` youngest groups are done: their registers and shared memory are free."""
    nvvm("wgmma.wait.group.sync.aligned", group=f"{in_flight} : i64")


def fragment(k, layout: ThreadValues, blocks: list[Value]) -> Fragment:
    """The sums of all blocks of 64 rows as a Fragment of `sums_layout`."""

    def piece(digits):
        half, column, block = digits
        one = lambda i: Value(llvm.extractvalue(mlir_type(f32), blocks[block].ssa, [4 * column + 2 * half + i]), f32)
        return one(0).splat(2).insert(1, one(1))

    return Fragment(k, layout, False, piece)


def _signed(bits: int) -> Value:
    """A 64-bit pattern as an i64 constant."""
    return constant(bits - (1 << 64) if bits >> 63 else bits, i64)
