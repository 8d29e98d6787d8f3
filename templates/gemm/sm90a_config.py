"""How an sm_90a GEMM is cut up: tiles, warpgroups, stages; how operands lie in shared memory; who brings which box."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, gcd
from typing import Any

from flykernels.codeobject import TensorMap

from .problem import GemmProblem

TMA_BYTES = 16  # addresses and strides that TMA can use are multiples of it
SWIZZLE_MOST = 128  # bytes
BOX_MOST = 256  # elements of a TMA box along an axis
STAGE_ALIGNMENT = 1024  # bytes after which the widest swizzle repeats
WARP, WARPGROUP = 32, 128
SIMD_REGISTERS = 512  # of each lane, shared by the warps of a workgroup's warpgroups: one of each is on every SIMD
BRINGER_REGISTERS, REGISTERS_MOST = 40, 232  # that ptxas compiles the two roles for
BLOCK_M, BLOCK_K = 64, 16  # of one wgmma
COLUMNS_MOST = 256
BARRIER_BYTES = 8
SHELF_COLUMNS = 64  # of C that a warp turns round at a time
SHELVES = 2  # for TMA: one is written out while the other is filled
KINDS = ("wgmma", "mma")
EVICTS = ("none", "b", "both")
GROUP_M = 8


@dataclass(frozen=True)
class Sm90aConfig:
    """One way to cut the work.

    kind            "wgmma": TMA brings tiles, warpgroups multiply them from shared memory; "mma": threads copy tiles
                    element by element and warps multiply from registers, for operands that TMA cannot read
    tile_m, tile_n  of C, a workgroup's
    tile_k          of A and B, a stage's
    stages          K tiles in shared memory
    groups          warpgroups that multiply, along (M, N)
    cluster         workgroups along (M, N) that share what they load: each brings a part and all get it
    split_k         workgroups that share a tile of C, each with a part of K; the last to come sums in a fixed order
    k_cluster       whether those workgroups are a cluster and add up through each other's shared memory, see
                    sm90a_cluster.py; else through device memory
    stream_k        so many workgroups for everything: the tiles that fill them evenly are done whole, and the K steps
                    of the rest are dealt out evenly (0: off)
    persistent      workgroups stay, `beside` on each compute unit, and walk through the tiles
    beside          workgroups on a compute unit at a time
    group_m         rows of tiles that are worked on together: see order.py
    evict           operands whose lines leave L2 first: "none", "b" or "both"
    overlap         "late": the launch may begin once the workgroups of the kernel ahead have ended, before what they
                    have written can be seen; "early": and lets the next kernel take multiprocessors one by one as its
                    own workgroups end, in whatever order that is; "none"
    tma_store       C leaves through shared memory by TMA, else by 16-byte stores
    """

    kind: str = "wgmma"
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    groups: tuple[int, int] = (2, 1)
    cluster: tuple[int, int] = (1, 1)
    split_k: int = 1
    k_cluster: bool = False
    stream_k: int = 0
    persistent: bool = False
    beside: int = 1
    group_m: int = GROUP_M
    evict: str = "none"
    overlap: str = "none"
    tma_store: bool = False

    def __post_init__(self):
        for name in ("groups", "cluster"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists

    @property
    def multipliers(self) -> int:
        """Threads that multiply."""
        return self.groups[0] * self.groups[1] * WARPGROUP

    @property
    def bringers(self) -> int:
        """Threads of the role that brings tiles. One warp would do; beside several warpgroups it is a warpgroup, since
        only warpgroups can hand their registers to others, and registers are shared out for as many warps on all SIMDs.
        """
        several = self.multipliers > WARPGROUP and self.beside == 1
        return 0 if self.kind != "wgmma" else WARPGROUP if several else WARP

    @property
    def workgroup_size(self) -> int:
        return self.multipliers + self.bringers

    @property
    def registers(self) -> int:
        """That each thread that multiplies takes, once the others have given up theirs."""
        each = (SIMD_REGISTERS // self.beside - BRINGER_REGISTERS) // (self.multipliers // WARPGROUP)
        return min(REGISTERS_MOST, each // 8 * 8)

    @property
    def columns(self) -> int:
        """Of C, a warpgroup's."""
        return self.tile_n // self.groups[1]

    @property
    def blocks(self) -> int:
        """Of 64 rows of C, a warpgroup's."""
        return ceil(self.tile_m / (BLOCK_M * self.groups[0]))

    @property
    def sums(self) -> int:
        """Of C, a thread's."""
        return self.blocks * self.columns * BLOCK_M // WARPGROUP

    @property
    def one_tile(self) -> bool:
        """Whether a workgroup does one tile and leaves."""
        return not self.persistent and not self.stream_k

    @property
    def cluster_size(self) -> int:
        """Workgroups that share what they load."""
        return self.cluster[0] * self.cluster[1]

    @property
    def launched_cluster(self) -> int:
        """Workgroups of a cluster."""
        return self.split_k if self.k_cluster else self.cluster_size

    def policy(self, operand: str) -> str:
        """How long L2 is to keep the lines of operand "a" or "b", by the name that `sm90a_tma` has for it."""
        first = {"none": "", "b": "b", "both": "ab"}[self.evict]
        return "evict_first" if operand in first else "normal"

    def steps(self, p: GemmProblem) -> int:
        """K tiles."""
        return ceil(p.k / self.tile_k)

    def key(self) -> dict:
        """Readable JSON form."""
        return {**asdict(self), "groups": list(self.groups), "cluster": list(self.cluster)}

    def __str__(self) -> str:
        groups = "x".join(map(str, self.groups))
        more = [
            f"clusters of {self.cluster[0]}x{self.cluster[1]}" if self.cluster_size > 1 else "",
            f"K in {self.split_k}{' in a cluster' if self.k_cluster else ''}" if self.split_k > 1 else "",
            f"K steps dealt out to {self.stream_k}" if self.stream_k else "",
            "persistent" if self.persistent else "",
            f"{self.beside} a unit" if self.beside > 1 else "",
            f"evicts {self.evict}" if self.evict != "none" else "",
            f"overlaps {self.overlap}" if self.overlap != "none" else "",
            "TMA stores" if self.tma_store else "",
            f"{self.group_m} rows together" if self.group_m != GROUP_M else "",
        ]
        head = f"{self.kind} {self.tile_m}x{self.tile_n}x{self.tile_k}, {self.stages} stages, {groups} groups"
        return ", ".join([head, *filter(None, more)])


@dataclass(frozen=True)
class Boxes:
    """How TMA brings one operand's tile of a stage.

    box      (inner, outer) elements of one transfer: the contiguous axis first
    at       for each transfer (bytes from the tile's start in shared memory, rows of M or N, K), from the tile's origin
    share    the same three for each next workgroup that shares the tile: it brings another part of each box"""

    box: tuple[int, int]
    at: tuple[tuple[int, int, int], ...]
    share: tuple[int, int, int]


def boxes(operand, sharers: int) -> Boxes:
    """The transfers of a `SharedOperand` that `sharers` workgroups bring in equal parts."""
    if operand.along_k:
        pieces = ceil(operand.rows / BOX_MOST)
        rows = operand.rows // pieces
        part = rows // sharers
        at = tuple(
            (box * operand.box_bytes + piece * rows * operand.swizzle, piece * rows, box * operand.row)
            for box in range(operand.boxes)
            for piece in range(pieces)
        )
        return Boxes((operand.row, part), at, (part * operand.swizzle, part, 0))
    part = operand.depth // sharers
    at = tuple((box * operand.box_bytes, box * operand.row, 0) for box in range(operand.boxes))
    return Boxes((operand.row, part), at, (part * operand.swizzle, 0, part))


def along_k(p: GemmProblem, operand: str) -> bool:
    """Whether K is the operand's contiguous axis."""
    return p.a == "row" if operand == "a" else p.b == "col"


def tma_reads(p: GemmProblem) -> str | None:
    """Why TMA cannot read the operands, in words; None if it can."""
    if "any" in (p.a, p.b):
        return "an operand has no contiguous axis"
    if min(p.align_a, p.align_b) < TMA_BYTES:
        return f"A is aligned to {p.align_a} bytes and B to {p.align_b}; TMA needs {TMA_BYTES}"
    return None


def shared_operands(p: GemmProblem, cfg: Sm90aConfig) -> tuple[Any, Any]:
    """(A, B) as `SharedOperand`s of a stage."""
    from flykernels.targets.sm90a_wgmma import SharedOperand

    row = SWIZZLE_MOST // p.input_type.bytes
    a_rows = cfg.tile_m if along_k(p, "a") else max(BLOCK_M, cfg.tile_m)
    a = SharedOperand(a_rows, cfg.tile_k, along_k(p, "a"), SWIZZLE_MOST, p.input_type)
    width = SWIZZLE_MOST if along_k(p, "b") else gcd(cfg.columns, row) * p.input_type.bytes
    return a, SharedOperand(cfg.tile_n, cfg.tile_k, along_k(p, "b"), width, p.input_type)


def shelf_pitch(p: GemmProblem, columns: int) -> int:
    """Elements between rows of C that are turned round in shared memory: 16 bytes more than a row, so that neither the
    fragments' 4-byte stores nor the 16-byte loads of whole rows conflict."""
    return columns + TMA_BYTES // p.output_type.bytes


@dataclass(frozen=True)
class Room:
    """Shared memory of a workgroup, in bytes from its start: the ring's stages, shelves for C, what others of a cluster
    send, then barriers. Where a workgroup has one tile only, the shelves lie where the ring was."""

    stage: int
    shelves: int
    inbox: int
    barriers: int
    total: int


def shared_memory(p: GemmProblem, cfg: Sm90aConfig) -> Room:
    """How much shared memory a "wgmma" configuration takes, and for what."""
    a, b = shared_operands(p, cfg)
    stage = a.bytes + b.bytes
    beyond = max(0, BLOCK_M - a.rows) * a.swizzle  # wgmma reads 64 rows, whatever is there
    ring = up(cfg.stages * stage + beyond, STAGE_ALIGNMENT)
    shelves = 0 if cfg.one_tile else ring
    inbox = barriers = max(ring, shelves + shelf_bytes(p, cfg))
    if cfg.k_cluster:
        from .sm90a_cluster import inbox_bytes

        barriers += inbox_bytes(p, cfg)
    return Room(stage, shelves, inbox, barriers, barriers + (2 * cfg.stages + 1) * BARRIER_BYTES)


def shelf_bytes(p: GemmProblem, cfg: Sm90aConfig) -> int:
    """Where warpgroups turn 64 rows of C each round. For TMA: two shelves in turn, of 128 bytes of each row."""
    groups = cfg.groups[0] * cfg.groups[1]
    if cfg.tma_store:
        return SHELVES * groups * BLOCK_M * SWIZZLE_MOST
    pitch = shelf_pitch(p, min(SHELF_COLUMNS, cfg.columns))
    return groups * BLOCK_M * pitch * p.output_type.bytes if stores_wide(p) else 0


def stores_wide(p: GemmProblem) -> bool:
    """Whether C can be written in 16-byte vectors."""
    return p.align_c >= TMA_BYTES and p.n % (TMA_BYTES // p.output_type.bytes) == 0


@dataclass(frozen=True)
class Image:
    """How an operand's K tile lies in shared memory where threads copy it (kind "mma"): lines of its contiguous axis,
    16 bytes apart from each other, so that the 8 lines of one ldmatrix are in different banks.

    chunk  elements that one cp.async moves; 1: all go through registers, 8 to a thread"""

    rows: int
    depth: int
    along_k: bool
    bytes_each: int
    chunk: int

    @property
    def line(self) -> int:
        return self.depth if self.along_k else self.rows

    @property
    def lines(self) -> int:
        return self.rows if self.along_k else self.depth

    @property
    def pitch(self) -> int:
        return self.line + TMA_BYTES // self.bytes_each

    @property
    def elements(self) -> int:
        return self.lines * self.pitch


def copied_images(p: GemmProblem, cfg: Sm90aConfig) -> tuple[Image, Image]:
    """(A, B) of a stage of kind "mma". Without a contiguous axis a line runs along K."""
    size = p.input_type.bytes
    together = min(p.align_a, p.align_b, TMA_BYTES) // size if "any" not in (p.a, p.b) else 1
    image = lambda name, rows: Image(rows, cfg.tile_k, along_k(p, name) or getattr(p, name) == "any", size, together)
    return image("a", up(cfg.tile_m, BLOCK_M)), image("b", cfg.tile_n)


def copied_room(p: GemmProblem, cfg: Sm90aConfig) -> Room:
    """Shared memory of kind "mma": `stage` is where B's ring starts, `barriers` where the last to come is noted."""
    a, b = copied_images(p, cfg)
    b_start = cfg.stages * a.elements * a.bytes_each
    shelves = up(b_start + cfg.stages * b.elements * b.bytes_each, STAGE_ALIGNMENT)
    board = shelves + shelf_bytes(p, cfg)
    return Room(b_start, shelves, board, board, board + BARRIER_BYTES)


def tensor_maps(p: GemmProblem, cfg: Sm90aConfig) -> tuple[TensorMap, ...]:
    """The tensor maps of a "wgmma" kernel: a_map and b_map, and c_map if TMA stores."""
    a, b = shared_operands(p, cfg)
    batch = lambda name: (("batch", f"{name}_batch"),) if p.batched else ()
    one = (1,) if p.batched else ()

    def operand(name: str, shared, rows, sharers: int) -> TensorMap:
        axes = ((p.k, 1), (rows, f"{name}_{'row' if name == 'a' else 'col'}"))
        if not shared.along_k:
            axes = ((rows, 1), (p.k, f"{name}_{'col' if name == 'a' else 'row'}"))
        box = boxes(shared, sharers).box
        return TensorMap(f"{name}_map", name, (*axes, *batch(name)), (*box, *one), shared.swizzle)

    maps: tuple[TensorMap, ...] = (operand("a", a, "m", cfg.cluster[1]), operand("b", b, p.n, cfg.cluster[0]))
    if cfg.tma_store:
        box = (SWIZZLE_MOST // p.output_type.bytes, min(BLOCK_M, cfg.tile_m), *one)
        maps += (TensorMap("c_map", "c", ((p.n, 1), ("m", "c_row"), *batch("c")), box, SWIZZLE_MOST, 0),)
    return maps


def up(size: int, step: int) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step
