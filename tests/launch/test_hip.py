"""The HIP loader against a recording library: every call, every argument, every failure. No AMD GPU is involved."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from flykernels.codeobject import Argument, CodeObject, Extent
from flykernels.launch.hip import Hip, HipError, load, runtime

from .recorder import FUNCTION, MODULE, RecordingHip

ARGUMENTS = (
    Argument("a", "pointer", "bf16"), Argument("c", "pointer", "bf16"), Argument("m", "i64", "i64"),
    Argument("n", "i32", "i32"), Argument("scale", "f32", "f32"),
)  # fmt: skip
CODE = CodeObject(
    "gfx950", "gfx950", "gemm", ARGUMENTS, ((Extent("m", 64), Extent(3)),), 256, binary=b"\x7fELF\0whole\0binary"
)


def recording(code=CODE):
    library = RecordingHip(code)
    return library, Hip(library)


def test_loading_hands_over_the_whole_binary_and_asks_for_the_entry():
    library, hip = recording()
    library.current = 3
    kernel = load(CODE, hip)
    assert library.binary == CODE.binary
    mode = "hipThreadExchangeStreamCaptureMode"  # loading is allowed while a graph is being captured
    loaded = ["hipGetDevice", mode, "hipModuleLoadData", "hipModuleGetFunction", mode]
    assert [name for name, _ in library.calls] == loaded
    assert library.named("hipModuleGetFunction") == [(MODULE, "gemm")]
    assert kernel.device == 3 and kernel.function.value == FUNCTION


def test_a_launch_is_one_call_with_every_argument_in_its_own_width():
    library, hip = recording()
    kernel = load(CODE, hip)
    address = 0x7FFF_0000_1234_5678
    kernel(address, 0, 130, -7, 0.5, stream=0xABC0)
    kernel(8, 16, 2**28, 1, -2.0)
    assert library.named("hipModuleLaunchKernel") == [
        (FUNCTION, (3 * 3, 1, 1), (256, 1, 1), 0, 0xABC0, [address, 0, 130, -7, 0.5], False),
        (FUNCTION, (3 * 2**22, 1, 1), (256, 1, 1), 0, 0, [8, 16, 2**28, 1, -2.0], False),
    ]


def test_grids_that_hip_cannot_launch_are_refused_before_the_call():
    library, hip = recording()
    kernel = load(CODE, hip)
    with pytest.raises(HipError, match="workgroups"):
        kernel(0, 0, 2**40, 1, 1.0)
    tall = load(replace(CODE, grid=((Extent(1),), (Extent("m"),))), hip)
    assert tall.grid({"m": 65535}) == (1, 65535, 1)
    with pytest.raises(HipError, match="65535"):
        tall(0, 0, 65536, 1, 1.0)
    assert not library.named("hipModuleLaunchKernel")


def test_an_empty_grid_launches_nothing():
    library, hip = recording()
    load(CODE, hip)(0, 0, 0, 1, 1.0)
    assert not library.named("hipModuleLaunchKernel")


def test_wrong_number_of_arguments_and_wrong_device():
    library, hip = recording()
    kernel = load(CODE, hip)
    with pytest.raises(TypeError, match="takes 5 arguments, a: pointer, c: pointer, m: i64"):
        kernel(1, 2)
    library.current = 1
    with pytest.raises(HipError, match="loaded on device 0, and device 1 is current"):
        kernel(0, 0, 64, 1, 1.0)
    hip.set_device(0)
    kernel(0, 0, 64, 1, 1.0)
    assert library.named("hipSetDevice") == [(0,)] and len(library.named("hipModuleLaunchKernel")) == 1


@pytest.mark.parametrize(
    "function, status, name",
    [
        ("hipModuleLoadData", 209, "hipErrorNoBinaryForGpu"), ("hipModuleGetFunction", 98, "InvalidDeviceFunction"),
        ("hipGetDevice", 2, "OutOfMemory"),
    ],
)  # fmt: skip
def test_failures_name_call_error_and_kernel(function, status, name):
    library, hip = recording()
    library.fail[function] = status
    with pytest.raises(HipError, match=f"{function} returned .*{name}.*as told to"):
        load(CODE, hip)
    unloaded = library.named("hipModuleUnload")
    assert unloaded == ([(MODULE,)] if function == "hipModuleGetFunction" else [])


def test_a_failed_launch_and_unloading():
    library, hip = recording()
    kernel = load(CODE, hip)
    library.fail["hipModuleLaunchKernel"] = 2
    with pytest.raises(HipError, match=r"launching gemm on a grid of \(3, 1, 1\).*hipErrorOutOfMemory"):
        kernel(0, 0, 64, 1, 1.0)
    kernel.unload()
    kernel.unload()
    assert library.named("hipModuleUnload") == [(MODULE,)]


def test_code_of_another_target_or_with_unknown_arguments_is_refused():
    library, hip = recording()
    with pytest.raises(HipError, match="code for x86"):
        load(replace(CODE, target="x86"), hip)
    with pytest.raises(HipError, match="kind f64"):
        load(replace(CODE, arguments=(Argument("x", "f64", "f64"),)), hip)
    assert not library.calls


def test_without_hip_the_error_says_what_to_do(monkeypatch):
    runtime.cache_clear()
    monkeypatch.setattr("flykernels.launch.hip.LIBRARIES", ("libnothere950.so",))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(HipError, match="install ROCm"):
        runtime()
    runtime.cache_clear()


def test_loading_needs_no_compiler():
    program = "import sys, flykernels.launch.hip; print([m for m in sys.modules if 'mlir' in m or 'flydsl' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
