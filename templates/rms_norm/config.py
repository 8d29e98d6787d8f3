"""One way to do an RMSNorm: what `space.py` proposes and the kernels are specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flykernels.dtypes import f32

WORK_PER_PART = 1 << 14  # elements of a row that outweigh a fork and join of a CPU's threads, some 3 us


@dataclass(frozen=True)
class GpuConfig:
    """How rows are dealt out to the threads of a GPU.

    threads_per_row     a power of two: part of a wave, a wave, or several
    rows_per_workgroup  rows that a workgroup works on at the same time
    vector              elements that move together
    held                rows stay in registers between the sum and the scaling; else they are read twice
    slices              workgroups, at most, that share a row, forward, in two launches: sums, then scaling
    parts               workgroups in all at most, each of which works on several tiles of rows in turn; 0 (forward
                        only): one workgroup a tile
    ahead               with parts: the next tile is fetched while one is worked on
    sums                backward: the weight's gradient is added up in registers along with dx; else by columns, apart
    beside              workgroups that registers leave room for on a unit, at least (sm90a; AMD's waves have their own)
    once                rows go past the caches, forward: the first to be evicted (sm90a)
    """

    threads_per_row: int
    rows_per_workgroup: int
    vector: int
    held: bool = True
    slices: int = 1
    parts: int = 0
    ahead: bool = True
    sums: bool = False
    beside: int = 1
    once: bool = False

    def __post_init__(self):
        for name in ("threads_per_row", "vector"):
            if getattr(self, name) < 1 or getattr(self, name) & (getattr(self, name) - 1):
                raise ValueError(f"{self}: {name} must be a power of two")
        if self.sums and not self.held:
            raise ValueError(f"{self}: sums that stay in registers need rows that do")

    @property
    def workgroup_size(self) -> int:
        return self.threads_per_row * self.rows_per_workgroup

    @property
    def alone(self) -> bool:
        """Whether one workgroup works on all rows, backward: what it has added up is the weight's gradient."""
        return self.sums and self.parts == 1 and self.rows_per_workgroup == 1

    def parts_for(self, rows: int, width: int, threads: int = 1) -> int:
        """The argument `parts`: workgroups that share the tiles of rows; none for no rows, but one that is alone."""
        tiles = -(-rows // self.rows_per_workgroup)
        return 1 if self.alone else min(tiles, self.parts or tiles)

    @property
    def slots(self) -> int:
        """Rows of sums that a part leaves in workspace, backward: one for each row that it works on at a time."""
        return self.rows_per_workgroup if self.sums else 1

    def workspace_bytes(self, rows: int, width: int, parts: int) -> int:
        """Bytes behind the argument `workspace`, where there is one."""
        return (parts * self.slots * width if self.parts else rows * self.slices) * f32.bytes

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)


@dataclass(frozen=True)
class X86Config:
    """How a CPU goes through a row.

    unroll  vectors in one turn of a loop, each with its own sum
    """

    unroll: int = 4

    workgroup_size = 1

    def parts_for(self, rows: int, width: int, threads: int = 1) -> int:
        """The argument `parts`: runs of neighbouring rows, one a thread; one where the work is not worth a fork."""
        return max(1, min(rows, threads, rows * width // WORK_PER_PART))

    def workspace_bytes(self, rows: int, width: int, parts: int) -> int:
        """Bytes behind the argument `workspace`, where there is one: a row of sums for each part."""
        return parts * width * f32.bytes

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)


def config_from_key(target: str, key: dict) -> GpuConfig | X86Config:
    """The configuration that `key()` described, for a target's name."""
    return X86Config(**key) if target == "x86" else GpuConfig(**key)
