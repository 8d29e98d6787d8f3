"""Who waits for whom on sm_90a: mbarriers in shared memory, named barriers, clusters, registers moved between roles.

Semantics: PTX ISA 8.4, "Parallel Synchronization and Communication Instructions"."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import i32, i64
from ..lang.memory import advance
from ..lang.values import Value, constant, mlir_type, select
from ..mlir import llvm
from .sm90a_nvvm import nvvm, pointer, special_register

BARRIER_BYTES = 8
WAIT_HINT = 10_000_000  # ns that the hardware may suspend a waiting thread for before it asks again
ALL_LANES = -1
CTA = "#nvvm.mem_scope<cta>"


@dataclass(frozen=True)
class Barriers:
    """A row of mbarriers in shared memory. Phases alternate; a wait for parity p returns once the phase of that parity
    has ended, so that on a fresh barrier waiting for parity 1 returns at once."""

    pointer: object
    count: int

    @property
    def bytes(self) -> int:
        return self.count * BARRIER_BYTES

    def at(self, i):
        """Pointer to barrier i (an int or an i32 Value)."""
        words = i if isinstance(i, int) else i.to(i32)
        return advance(self.pointer, words, i64)

    def init(self, arrivals: int) -> None:
        """Each phase ends after so many arrivals and the bytes they expect. By one thread; then `fence_init`."""
        for i in range(self.count):
            nvvm("mbarrier.init", self.at(i), constant(arrivals, i32))

    def wait(self, i, parity: Value) -> None:
        """Until the phase of this parity has ended."""
        nvvm("mbarrier.try_wait.parity", self.at(i), parity, constant(WAIT_HINT, i32))

    def expect(self, i, size: int | Value) -> None:
        """One arrival, and the phase ends only when `size` bytes more have come by TMA."""
        size = size if isinstance(size, Value) else constant(size, i32)
        nvvm("mbarrier.arrive.expect_tx", self.at(i), size, relaxed="false", scope=CTA)

    def arrive(self, i) -> None:
        nvvm("mbarrier.arrive", self.at(i), result=mlir_type(i64), relaxed="false", scope=CTA)

    def arrive_at(self, i, workgroup: Value) -> None:
        """Arrives at the same barrier of another workgroup of the cluster. CTA scope is enough: what is handed over is
        the right to overwrite, and a cluster-wide release would cost a fence of all memory each time."""
        there = nvvm("mapa", self.at(i), workgroup, result=pointer(7))
        nvvm("mbarrier.arrive", there, relaxed="false", scope=CTA)


@dataclass(frozen=True)
class Position:
    """Where a role stands in a ring of `stages`: the stage, and the parity of the phase it waits for there."""

    stage: Value
    parity: Value
    stages: int

    @staticmethod
    def start(stages: int, parity: int) -> Position:
        """parity 0 for those who wait for data, 1 for those who wait for room (there is at first)."""
        return Position(constant(0, i32), constant(parity, i32), stages)

    def next(self) -> Position:
        after = self.stage + 1
        wraps = after.equals(self.stages)
        return Position(select(wraps, 0, after), select(wraps, self.parity ^ 1, self.parity), self.stages)

    @property
    def carried(self) -> tuple[Value, Value]:
        """What a loop carries; `of` gives the position back."""
        return self.stage, self.parity

    @staticmethod
    def of(carried, stages: int) -> Position:
        """The position that `carried` stands for."""
        stage, parity = carried
        return Position(stage, parity, stages)


def fence_init() -> None:
    """Barriers that this thread has initialised can be used by TMA and by other workgroups of the cluster."""
    nvvm("fence.mbarrier.init")


def fence_async() -> None:
    """What this thread wrote to shared memory by ordinary stores is seen by TMA and wgmma."""
    nvvm("fence.proxy", kind="#nvvm.proxy_kind<async.shared>", space="#nvvm.shared_space<cta>")


def named_barrier(number: int | Value, threads: int) -> None:
    """`threads` threads (whole warps) meet at barrier `number` (1 to 15; 0 is the workgroup's own)."""
    number = number if isinstance(number, Value) else constant(number, i32)
    nvvm("barrier", number, constant(threads, i32), segments=(1, 1), aligned="true")


def named_arrive(number: int, threads: int) -> None:
    """Counts this warp as arrived at a named barrier, and goes on; what it wrote before is seen by those who wait."""
    nvvm("barrier.arrive", constant(number, i32), constant(threads, i32), aligned="true")


def warp_barrier() -> None:
    """The warp's 32 threads meet, and see each other's stores to shared memory."""
    nvvm("bar.warp.sync", constant(ALL_LANES, i32))


def cluster_rank() -> Value:
    """This workgroup's number in its cluster."""
    return special_register("cluster.ctarank")


def cluster_barrier(ordered: bool = False) -> None:
    """All threads of all workgroups of the cluster that have not ended meet. ordered: and see what the others have
    written; else it orders no memory but initialised mbarriers (`fence_init`)."""
    nvvm("cluster.arrive" if ordered else "cluster.arrive.relaxed")
    cluster_wait()


def cluster_arrive() -> None:
    """Counts this thread as come to the next `cluster_barrier`, and goes on. `cluster_wait` must follow."""
    nvvm("cluster.arrive.relaxed")


def cluster_wait() -> None:
    """Until all threads of the cluster that have not ended have arrived."""
    nvvm("cluster.wait")


def shared_memory_of(here, workgroup: int):
    """A pointer to the same place in the shared memory of another workgroup of the cluster."""
    return nvvm("mapa", here, constant(workgroup, i32), result=pointer(7))


def give_registers(to: int) -> None:
    """This warpgroup keeps `to` registers a thread (a multiple of 8, 24 to 256) and gives the rest up.

    The first instruction of a role; all four warps execute it."""
    nvvm("setmaxregister", action="#nvvm<action decrease>", regCount=f"{to} : i32")


def take_registers(to: int) -> None:
    """This warpgroup waits for registers that others have given up, until it has `to` a thread."""
    nvvm("setmaxregister", action="#nvvm<action increase>", regCount=f"{to} : i32")


def wait_for_kernels_ahead() -> None:
    """Until the kernels before this one in the stream have ended and what they wrote can be seen, where this one may be
    launched before (`CodeObject.overlaps`). By every thread that touches memory others write or read.

    As assembly, because LLVM takes its own intrinsic for one that has nothing to do with memory."""
    _assembly("griddepcontrol.wait;")


def let_kernels_follow() -> None:
    """The next kernel, if it overlaps, may be launched once a thread of every workgroup has said so or ended."""
    _assembly("griddepcontrol.launch_dependents;")


def _assembly(text: str) -> None:
    llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)


def workgroups() -> Value:
    """How many workgroups were launched along x."""
    return special_register("nctaid.x")
