"""TMA on sm_90a: boxes of a tensor, described by a tensor map, between device and shared memory, asynchronously.

Semantics: PTX ISA 8.4, cp.async.bulk.tensor. A box lies in shared memory row by row without gaps; what lies outside
the tensor arrives as zeros and is not written, but counts among the bytes that a barrier waits for."""

from __future__ import annotations

from ..dtypes import i16, i32, i64
from ..lang.values import Value, constant
from ..mlir import llvm
from .sm90a_nvvm import nvvm, pointer

# createpolicy's encodings of L2 policies for all lines of a transfer, as `createpolicy.fractional` gives them
POLICIES = {"normal": 0x1000000000000000, "evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000}
TMA_ALIGNMENT = 16  # bytes: of addresses and strides in memory


def prefetch_map(tensor_map) -> None:
    """Brings a tensor map into the cache that TMA reads it from."""
    nvvm("prefetch", tensor_map, tensormap=True)


def policy(name: str) -> Value | None:
    """An L2 policy by its name in POLICIES, as `load_box` takes it; of "normal" none is needed."""
    return None if name == "normal" else constant(POLICIES[name], i64)


def load_box(tensor_map, to, barrier, at, hint: Value | None = None, multicast: Value | None = None) -> None:
    """Starts to bring the box at `at` (i32 Values, innermost first) to shared memory; its bytes count at `barrier`.

    By one thread. to: a pointer aligned to 128 bytes, and to the swizzle's period for the pattern to begin there.
    hint: of L2, see `policy`. multicast: an i16 mask of workgroups of the cluster: each gets the box, at the same
    place, and its barrier the count.
    """
    into = llvm.addrspacecast(pointer(7), to)
    more = [] if multicast is None else [multicast]
    more += [] if hint is None else [hint]
    nvvm(
        "cp.async.bulk.tensor.shared.cluster.global", into, tensor_map, *at, barrier, *more,
        segments=(1, 1, len(at), 1, 0, int(multicast is not None), int(hint is not None), 0),
        isCTAOnly="false", mode="#nvvm.tma_load_mode<tile>",
    )  # fmt: skip


def store_box(tensor_map, source, at) -> None:
    """Starts to write a box from shared memory, after `fence_async` by those who filled it. By one thread; `commit`."""
    nvvm(
        "cp.async.bulk.tensor.global.shared.cta", tensor_map, source, *at,
        segments=(1, 1, len(at), 0, 0), mode="#nvvm.tma_store_mode<tile>",
    )  # fmt: skip


def commit_stores() -> None:
    """The stores that this thread has started since the last time are one group."""
    nvvm("cp.async.bulk.commit.group")


def wait_stores_read(in_flight: int) -> None:
    """Until all but this thread's `in_flight` youngest groups have been read out of shared memory."""
    nvvm("cp.async.bulk.wait_group", group=f"{in_flight} : i32", read=True)


def mask_of(bits, shift=0) -> Value:
    """A multicast mask: the workgroups whose bit is set in `bits` (an int), `shift` (int or i32 Value) higher."""
    if isinstance(shift, int):
        return constant(bits << shift, i16)
    return (constant(bits, i32) << shift).to(i16)
