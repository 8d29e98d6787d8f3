"""The CUDA loader against a recording library: every call, every argument, every failure. No GPU is involved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from flykernels.codeobject import Argument, CodeObject, Extent, TensorMap
from flykernels.launch import current
from flykernels.launch.cuda import Cuda, CudaError, load, runtime

from .recorder import FUNCTION, MODULE, RecordingCuda

ARGUMENTS = (
    Argument("a", "pointer", "bf16"), Argument("c", "pointer", "bf16"), Argument("m", "i64", "i64"),
    Argument("n", "i32", "i32"), Argument("scale", "f32", "f32"),
)  # fmt: skip
CODE = CodeObject(
    "sm90a", "sm_90a", "gemm", ARGUMENTS, ((Extent("m", 64), Extent(3)),), 256, binary=b"\x7fELF\0whole\0binary"
)
TMA = replace(
    CODE, arguments=(*ARGUMENTS[:3], Argument("a_row", "i64", "i64")),
    tensor_maps=(TensorMap("map", "a", ((4096, 1), ("m", "a_row")), (64, 128)),), dynamic_bytes=100_000,
)  # fmt: skip


def recording(code=CODE):
    library = RecordingCuda(code)
    return library, Cuda(library)


def test_loading_hands_over_the_whole_image_ending_in_a_nul():
    library, driver = recording()
    library.thread = 0x103
    kernel = load(CODE, driver)
    assert library.binary == CODE.binary + b"\0"
    assert library.named("cuModuleGetFunction") == [(MODULE, "gemm")]
    assert library.named("cuModuleLoadDataEx") == [([5, 6], 2)]  # the error log's options; relaxed capture mode
    assert library.mode == 0 and kernel.device == 3 and kernel.function.value == FUNCTION


def test_a_launch_is_one_call_with_every_argument_in_its_own_width():
    library, driver = recording()
    kernel = load(CODE, driver)
    address = 0x7FFF_0000_1234_5678
    kernel(address, 0, 130, -7, 0.5, stream=0xABC0)
    before = len(library.calls)
    kernel(8, 16, 2**28, 1, -2.0)
    kernel(address, 0, 130, -7, 0.5, stream=0xABC0)
    first = (FUNCTION, (9, 1, 1), (256, 1, 1), 0, 0xABC0, [address, 0, 130, -7, 0.5], [], None)
    second = (FUNCTION, (3 * 2**22, 1, 1), (256, 1, 1), 0, 0, [8, 16, 2**28, 1, -2.0], [], None)
    assert library.named("cuLaunchKernelEx") == [first, second, first]
    assert len(library.calls) == before + 2  # nothing but the launches


def test_negative_zero_is_not_zero():
    library, driver = recording()
    kernel = load(CODE, driver)
    for scale in (0.0, -0.0):
        kernel(8, 16, 64, 1, scale)
    assert [str(call[5][-1]) for call in library.named("cuLaunchKernelEx")] == ["0.0", "-0.0"]


def test_many_addresses_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("flykernels.launch.gpu_kernel.PREPARED_MOST", 4)
    library, driver = recording()
    kernel = load(CODE, driver)
    for i in range(11):
        kernel(16 * i, 0, 64, 1, 1.0)
    assert [call[5][0] for call in library.named("cuLaunchKernelEx")] == [16 * i for i in range(11)]
    assert len(kernel._prepared) <= 4


def test_tensor_maps_are_made_once_for_a_tensor():
    library, driver = recording(TMA)
    kernel = load(TMA, driver)
    for address, m in ((0x1000, 100), (0x2000, 100), (0x1000, 100)):
        kernel(address, 0x9000, m, 4096)
        kernel(address, 0xA000, m, 4096)
    encoded = [(9, a, [4096, 100], [8192], [64, 128], [1, 1], 3, 3) for a in (0x1000, 0x2000)]
    assert library.named("cuTensorMapEncodeTiled") == encoded
    launched = library.named("cuLaunchKernelEx")
    assert [call[6] for call in launched] == [[a] for a in (0x1000,) * 2 + (0x2000,) * 2 + (0x1000,) * 2]
    assert {call[3] for call in launched} == {100_000}
    assert library.named("cuFuncSetAttribute") == [(FUNCTION, 8, 100_000)]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((0x1008, 0, 64, 4096), "address 0x1008 is no multiple of 16"),
        ((0x1000, 0, 64, 4095), r"strides of \[8190\] bytes must be multiples of 16"),
        ((0x1000, 0, 64, 2**40), "below 2"),
    ],
)
def test_tensors_that_tma_cannot_read_are_named(arguments, said):
    library, driver = recording(TMA)
    with pytest.raises(CudaError, match=f"gemm: tensor map map of sizes.*{said}"):
        load(TMA, driver)(*arguments)
    assert not library.named("cuTensorMapEncodeTiled") and not library.named("cuLaunchKernelEx")


def test_what_the_driver_refuses_to_encode_is_said_in_full():
    library, driver = recording(TMA)
    library.fail["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(CudaError, match=r"box \(64, 128\): cuTensorMapEncodeTiled returned CUDA_ERROR_INVALID_VALUE"):
        load(TMA, driver)(0x1000, 0, 64, 4096)


def test_clusters_are_asked_for_and_large_ones_allowed():
    code = replace(CODE, cluster=2, grid_most=132)
    library, driver = recording(code)
    load(code, driver)(8, 16, 64 * 100, 1, 1.0)
    (launched,) = library.named("cuLaunchKernelEx")
    assert launched[1] == (132, 1, 1) and launched[-1] == (4, [2, 1, 1])
    assert not library.named("cuFuncSetAttribute")
    load(replace(code, cluster=16), driver)
    assert library.named("cuFuncSetAttribute") == [(FUNCTION, 14, 1)]


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_kernel_that_overlaps_is_launched_so(cluster):
    for overlaps in (False, True):
        code = replace(CODE, cluster=cluster, grid_most=132, overlaps=overlaps)
        library, driver = recording(code)
        load(code, driver)(8, 16, 64 * 100, 1, 1.0)
        assert library.overlaps == ([[1]] if overlaps else [[]])
        (launched,) = library.named("cuLaunchKernelEx")
        assert launched[-1] == (None if cluster == 1 else (4, [2, 1, 1]))


def test_grids_that_cannot_be_launched_are_refused_before_the_call():
    library, driver = recording()
    tall = load(replace(CODE, grid=((Extent(1),), (Extent("m"),))), driver)
    assert tall.grid({"m": 65535}) == (1, 65535, 1)
    with pytest.raises(CudaError, match="65535"):
        tall(0, 0, 65536, 1, 1.0)
    assert not library.named("cuLaunchKernelEx")


def test_an_empty_grid_launches_nothing_and_makes_no_map():
    library, driver = recording(TMA)
    kernel = load(TMA, driver)
    kernel(0x1000, 0, 0, 4096)
    kernel(0, 0, 0, 0)
    assert not library.named("cuLaunchKernelEx") and not library.named("cuTensorMapEncodeTiled")


@pytest.mark.parametrize("arguments", [(1, 2), (0, 0, 64, 1, 1.0, 5), (0, 0, 64, 2**31, 1.0), (-1, 0, 64, 1, 1.0)])
def test_arguments_of_another_number_or_kind(arguments):
    library, driver = recording()
    with pytest.raises(TypeError, match="gemm takes 5 arguments, a: pointer, c: pointer, m: i64, n: i32, scale: f32"):
        load(CODE, driver)(*arguments)
    assert not library.named("cuLaunchKernelEx")


@pytest.mark.parametrize(
    "function, status, said",
    [
        ("cuModuleLoadDataEx", 218, "loading gemm on device 0: cuModuleLoadDataEx returned CUDA_ERROR_INVALID_PTX"),
        ("cuModuleGetFunction", 500, "cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND .as told to."),
        ("cuModuleLoadDataEx", 2, r"OUT_OF_MEMORY.*torch.cuda.empty_cache\(\)"),
    ],
)
def test_failures_of_loading_name_call_error_and_kernel(function, status, said):
    library, driver = recording()
    library.fail[function] = status
    with pytest.raises(CudaError, match=said) as caught:
        load(CODE, driver)
    assert caught.value.status == status and caught.value.out_of_memory == (status == 2)
    assert library.named("unload") == ([(MODULE,)] if function == "cuModuleGetFunction" else [])
    assert library.mode == 0


def test_what_cannot_be_used_does_not_stay_loaded():
    library, driver = recording(TMA)
    library.fail["cuFuncSetAttribute"] = 1
    with pytest.raises(CudaError, match=r"loading gemm on device 0 .attribute 8.: cuFuncSetAttribute"):
        load(TMA, driver)
    with pytest.raises(CudaError, match="tensor map map looks through 'a' with swizzle 48"):
        load(replace(TMA, tensor_maps=(replace(TMA.tensor_maps[0], swizzle=48),)), driver)
    assert len(library.named("unload")) == len(library.named("cuModuleLoadDataEx"))


def test_another_architecture_and_too_little_shared_memory():
    library, driver = recording()
    library.attributes[75] = 10
    with pytest.raises(CudaError, match="it is code for sm_90a alone, and the device is sm_100"):
        load(CODE, driver)
    library.attributes[75] = 9
    with pytest.raises(CudaError, match="needs 240000 bytes of shared memory a workgroup, and the device has 232448"):
        load(replace(CODE, dynamic_bytes=240_000), driver)
    assert not library.named("cuModuleLoadDataEx")
    with pytest.raises(CudaError, match="code for gfx950, and this is the loader for sm90a"):
        load(replace(CODE, target="gfx950"), driver)
    with pytest.raises(CudaError, match="kind f64"):
        load(replace(CODE, arguments=(Argument("x", "f64", "f64"),)), driver)


def test_a_failed_launch_says_what_to_do_and_whether_the_process_is_lost():
    library, driver = recording()
    kernel = load(CODE, driver)
    library.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(CudaError, match=r"launching gemm on a grid of \(3, 1, 1\).*ILLEGAL_ADDRESS.*refuses all") as e:
        kernel(0, 0, 64, 1, 1.0)
    assert e.value.sticky and not e.value.out_of_memory
    library.fail["cuLaunchKernelEx"] = 400
    library.thread = 0x101
    with pytest.raises(CudaError, match=r"was loaded on device 0, and device 1 is current.*INVALID_HANDLE") as e:
        kernel(0, 0, 64, 1, 1.0)
    assert not e.value.sticky
    kernel.unload()
    kernel.unload()
    assert library.named("unload") == [(MODULE,)]
    library.fail.clear()
    with pytest.raises(CudaError, match="gemm was unloaded from device 0: load it again"):
        kernel(0, 0, 64, 1, 1.0)
    assert library.named("cuLaunchKernelEx") == [("failed",)] * 2


def test_a_thread_that_has_not_met_cuda_gets_the_device_s_context():
    library, driver = recording()
    library.thread = 0x102
    kernel = load(CODE, driver)
    launch, tried = kernel._launch_function, []

    def refuse_once(*arguments):
        tried.append(library.thread)
        return 201 if library.thread == 0 else launch(*arguments)

    kernel._launch_function, library.thread = refuse_once, 0
    kernel(0, 0, 64, 1, 1.0)
    assert tried == [0, 0x102] and len(library.named("cuLaunchKernelEx")) == 1


def test_such_a_thread_may_ask_whether_a_stream_is_captured():
    code = replace(CODE, arguments=(*ARGUMENTS, Argument("w", "pointer", "f32")), workspace=(Extent(64),))
    library, driver = recording(code)
    library.thread = 0x102
    kernel = load(code, driver)
    ask = library.cuStreamIsCapturing
    library.cuStreamIsCapturing = lambda *a: ask(*a) if library.thread else 201
    library.thread = 0
    kernel(0, 0, 64, 1, 1.0)
    assert library.thread == 0x102 and len(library.named("cuLaunchKernelEx")) == 1
    library.cuStreamIsCapturing = lambda *a: 906
    with pytest.raises(CudaError, match="whether the stream is being captured"):
        kernel(0, 0, 64, 1, 1.0)


def test_devices_have_kernels_of_their_own():
    library, driver = recording()
    a, b = load(CODE, driver), load(CODE, driver, device=1)
    assert (a.device, b.device, library.thread) == (0, 1, 0x101)
    assert load(CODE, driver).device == 1
    library.thread = 0
    assert load(CODE, driver).device == 0  # a thread without any: the first


def test_the_launcher_follows_torch_s_device_and_stream(monkeypatch):
    torch = pytest.importorskip("torch")
    library, driver = recording()
    now = {"device": 0, "stream": 0x70}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now["device"])
    monkeypatch.setattr(current, "_stream_of", lambda: lambda device: now["stream"] + device)
    launch = current.Launcher(CODE, lambda code: load(code, driver, now["device"]))
    for device, stream in ((0, 0x70), (1, 0x70), (0, 0x90), (1, 0x70)):
        now.update(device=device, stream=stream)
        launch(8, 16, 64, 1, 1.0)
    assert [call[4] for call in library.named("cuLaunchKernelEx")] == [0x70, 0x71, 0x90, 0x71]
    assert len(library.named("cuModuleLoadDataEx")) == 2 and {*launch.kernels} == {0, 1}


def test_threads_share_a_kernel():
    library, driver = recording()
    kernel = load(CODE, driver)
    work = lambda i: [kernel(16 * i + n, i, 64, n, float(i), stream=i) for n in range(50)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    launched = library.named("cuLaunchKernelEx")
    assert len(launched) == 200
    assert all(call[5] == [16 * call[4] + call[5][3], call[4], 64, call[5][3], float(call[4])] for call in launched)


def test_without_a_driver_or_a_device_the_error_says_what_to_do(monkeypatch):
    runtime.cache_clear()
    monkeypatch.setattr("flykernels.launch.cuda.LIBRARIES", ("libnothere90.so",))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(CudaError, match=r"install NVIDIA's driver.*libnothere90"):
        runtime()
    runtime.cache_clear()
    library = RecordingCuda()
    library.fail["cuInit"] = 100
    with pytest.raises(CudaError, match="starting the CUDA driver: cuInit returned CUDA_ERROR_NO_DEVICE"):
        Cuda(library)


def test_loading_needs_no_compiler_and_no_torch():
    program = (
        "import sys, flykernels.launch.cuda, flykernels.launch.current; "
        "print([m for m in sys.modules if 'mlir' in m or 'flydsl' in m or m == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
