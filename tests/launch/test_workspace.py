"""Workspace against the recording libraries: zeroed, a stream's own, a graph's own, and used again when it is gone."""

from __future__ import annotations

import ctypes
import gc

import pytest

from flykernels.codeobject import Argument, CodeObject, Extent
from flykernels.launch import cuda, hip, workspace

from .recorder import RecordingCuda, RecordingHip

ARGUMENTS = (Argument("a", "pointer", "bf16"), Argument("m", "i64", "i64"), Argument("workspace", "pointer", "f32"))
CODE = CodeObject(
    "", "", "split", ARGUMENTS, ((Extent("m", 64),),), 128, workspace=(Extent("m", 64), Extent(256)), binary=b"code"
)
MAKERS = {
    "gfx950": (RecordingHip, hip.Hip, hip.load, "hipModuleLaunchKernel", "gfx950"),
    "sm90a": (RecordingCuda, cuda.Cuda, cuda.load, "cuLaunchKernelEx", "sm_90a"),
}


class Machine:
    def __init__(self, target):
        from dataclasses import replace

        recorder, driver, load, self.launch, features = MAKERS[target]
        code = replace(CODE, target=target, features=features)
        self.library = recorder(code)
        self.kernel = load(code, driver(self.library))

    @property
    def spaces(self):
        """The workspace of each launch."""
        return [call[5][-1] for call in self.library.named(self.launch)]


@pytest.fixture(params=list(MAKERS))
def machine(request):
    return Machine(request.param)


def test_a_stream_keeps_its_own_zeroed_piece(machine):
    for stream in (0, 0x50, 0, 0x50):
        machine.kernel(8, 64, stream=stream)
        machine.kernel(16, 64, stream=stream)
    a, b = machine.spaces[0], machine.spaces[2]
    assert machine.spaces == [a, a, b, b] * 2 and a != b
    assert [size for size, _ in machine.library.named("allocate")] == [256, 256]
    assert len(machine.library.memory) == 2
    for address in (a, b):  # fresh memory holds anything but zeros
        assert ctypes.string_at(address, 256) == bytes(256)


def test_zeroing_is_over_before_the_launch_and_on_a_stream_that_waits_for_none(machine):
    machine.kernel(8, 100, stream=7)
    names = [n for n, _ in machine.library.calls]
    shared = machine.library.shared
    order = [shared[n] for n in ("allocate", "create_stream", "set_bytes", "wait", "destroy_stream")]
    assert [n for n in names if n in order] == order
    assert names.index(shared["wait"]) < names.index(machine.launch)
    assert machine.library.named("create_stream") == [(1, 2)]  # non-blocking; the thread's capture mode is relaxed
    assert machine.library.mode == 0


def test_a_larger_launch_gets_a_larger_piece_and_the_old_one_is_left_to_those_that_have_it(machine):
    machine.kernel(8, 64)
    machine.kernel(8, 65)
    machine.kernel(8, 64)
    machine.kernel(8, 6400)
    assert [size for size, _ in machine.library.named("allocate")] == [256, 512, 25600]
    assert machine.spaces[0] == machine.spaces[2]  # as prepared


def test_every_captured_graph_has_pieces_of_its_own(machine):
    machine.kernel(8, 64, stream=7)
    machine.library.capturing = {7: (1, 0x900), 9: (1, 0x900)}
    for stream in (7, 7, 9):
        machine.kernel(8, 64, stream=stream)
    machine.library.capturing = {7: (2, 0x901)}
    machine.kernel(8, 64, stream=7)
    machine.library.capturing = {}
    machine.kernel(8, 64, stream=7)
    plain, first, again, beside, second, after = machine.spaces
    assert first == again and plain == after and len({plain, first, beside, second}) == 4
    assert {g: len(held) for g, held in machine.library.graphs.items()} == {0x900: 2, 0x901: 1}
    assert machine.library.named("graph_keeps") == [(0x900, 1, 1), (0x900, 1, 1), (0x901, 1, 1)]


def test_pieces_of_a_destroyed_graph_serve_the_next(machine):
    machine.library.capturing = {7: (1, 0x900)}
    machine.kernel(8, 64, stream=7)
    machine.library.destroy(0x900)
    machine.library.capturing = {7: (2, 0x901)}
    machine.kernel(8, 64, stream=7)
    machine.library.capturing = {7: (3, 0x902)}
    machine.kernel(8, 64, stream=7)
    first, second, third = machine.spaces
    assert first == second != third
    machine.library.capturing = {}
    machine.kernel(8, 64, stream=7)
    assert machine.spaces[-1] not in (first, third)


def test_a_graph_may_outlive_the_kernel(machine):
    machine.library.capturing = {7: (1, 0x900)}
    machine.kernel(8, 64, stream=7)
    ((semaphore, _),) = machine.library.graphs[0x900]
    del machine.kernel
    gc.collect()
    kept = workspace._Graph.waiting[semaphore]
    machine.library.destroy(0x900)  # the driver writes to the semaphore
    assert workspace._Graph.libc.sem_trywait(kept) == 0


def test_no_memory_left_says_whose_workspace_it_was(machine):
    machine.library.fail[machine.library.shared["allocate"]] = 2
    with pytest.raises(RuntimeError, match=r"split: 256 bytes of workspace.*(OutOfMemory|OUT_OF_MEMORY)"):
        machine.kernel(8, 64)
    assert not machine.spaces and machine.library.mode == 0
    machine.library.fail.clear()
    machine.kernel(8, 64)
    assert len(machine.spaces) == 1


@pytest.mark.parametrize("call", ["user_object", "graph_keeps"])
def test_a_piece_that_a_graph_could_not_be_told_of_is_not_given_away_twice(machine, call):
    function = machine.library.shared[call]
    machine.library.capturing = {7: (1, 0x900)}
    machine.kernel(8, 64, stream=7)
    machine.library.fail[function] = 2
    with pytest.raises(RuntimeError, match="split: tying workspace to a graph"):
        machine.kernel(8, 6400, stream=7)
    assert [size for size, _ in machine.library.named("allocate")] == [256]
    machine.library.fail.clear()
    machine.library.destroy(0x900)
    for number in (2, 3):  # two graphs that live side by side
        machine.library.capturing = {7: (number, 0x900 + number)}
        machine.kernel(8, 64, stream=7)
    first, *others = machine.spaces
    assert len(set(others)) == 2 and first in others
