"""Loads and launches sm_90a kernels (cubin or PTX) through NVIDIA's driver (libcuda): ctypes alone, no MLIR, no ptxas.

    kernel = load(code)                               # a CodeObject, on the current device, once
    kernel(a, b, c, m, *strides, stream=stream)       # addresses and numbers, as `code.arguments` lists them
    kernel.grid({"m": m, ...})                        # what it would be launched with

`flykernels.launch.current.Launcher` does this for torch's current device and stream. Loading and allocating are
allowed while a stream is being captured, and are not captured. Signatures and constants are those of CUDA's public
header cuda.h.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any, ClassVar

from ..codeobject import CodeObject
from . import tensor_map
from .driver import (
    HANDLE,
    INT_OUT,
    INVALID_CONTEXT,
    NUMBER,
    OUT,
    OUT_OF_MEMORY,
    SIZE_OUT,
    TEXT,
    Driver,
    DriverError,
    find,
)
from .gpu_kernel import Frame, GpuKernel, Sized, load_function
from .workspace import relaxed

LIBRARIES = ("libcuda.so.1", "libcuda.so")
COMPUTE_CAPABILITY = (75, 76)  # device attributes: major, minor
SHARED_MOST = 97  # device attribute: shared memory that a workgroup may ask for, in bytes
DYNAMIC_SHARED, LARGE_CLUSTER = 8, 14  # function attributes
CLUSTER_PORTABLE = (
    8  # workgroups of a cluster that every device allows (CUDA C Programming Guide, thread block clusters)
)
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6  # launch attributes
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # options of loading
LOG_BYTES = 8192
# CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes, how many. CUlaunchAttribute: id, padding to 8,
# a union of 64 bytes, here the three sizes of a cluster, or whether the launch may overlap what is ahead.
CONFIG, CLUSTER, OVERLAP = "7IPPI4x", "I4x3I52x", "I4xi60x"

INVALID_VALUE, NO_BINARY = 1, 209
# After one of these every later call in the process fails alike (cuda.h: the process is left in an inconsistent state).
STICKY = (214, 700, 702, 710, 714, 715, 716, 717, 718, 719)
HINTS = {
    OUT_OF_MEMORY: "Free memory on the device, or give torch's cache back with torch.cuda.empty_cache()",
    NO_BINARY: "The code was made for another architecture than this device's",
    218: "The PTX does not assemble for this device; put a ptxas on PATH, so that a cubin is made",
    222: "The driver is older than the PTX; put a ptxas on PATH, so that a cubin is made, or update the driver",
    701: "The kernel needs more registers or threads than a multiprocessor has",
    **dict.fromkeys(
        STICKY,
        "A kernel faulted, perhaps an earlier one, and CUDA refuses all further calls in this process. To see which, "
        "run again with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer",
    ),
    901: "Something that is not allowed while a stream is being captured was called",
}


class CudaError(DriverError):
    """A call of the CUDA driver that failed, with the call, its error's name, what CUDA says of it and what to do."""

    @property
    def sticky(self) -> bool:
        """Whether this process can use CUDA no more."""
        return self.status in STICKY


class Cuda(Driver):
    """The driver's functions, each checked. `library` has them as ctypes does: libcuda, or a recording one."""

    error: ClassVar[type[CudaError]] = CudaError  # type: ignore[misc]
    signatures: ClassVar[dict[str, tuple]] = {
        "cuInit": (NUMBER,),
        "cuCtxGetCurrent": (OUT,),
        "cuCtxSetCurrent": (HANDLE,),
        "cuCtxGetDevice": (INT_OUT,),
        "cuDevicePrimaryCtxRetain": (OUT, ctypes.c_int),
        "cuDeviceGetAttribute": (INT_OUT, ctypes.c_int, ctypes.c_int),
        "cuModuleLoadDataEx": (OUT, HANDLE, NUMBER, HANDLE, HANDLE),
        "cuModuleUnload": (HANDLE,),
        "cuModuleGetFunction": (OUT, HANDLE, TEXT),
        "cuFuncSetAttribute": (HANDLE, ctypes.c_int, ctypes.c_int),
        "cuLaunchKernelEx": (HANDLE, HANDLE, HANDLE, HANDLE),
        "cuTensorMapEncodeTiled": (HANDLE, ctypes.c_int, NUMBER, *[HANDLE] * 5, *[ctypes.c_int] * 4),
        "cuMemAlloc_v2": (OUT, ctypes.c_size_t),
        "cuMemsetD8Async": (HANDLE, ctypes.c_ubyte, ctypes.c_size_t, HANDLE),
        "cuStreamCreate": (OUT, NUMBER),
        "cuStreamSynchronize": (HANDLE,),
        "cuStreamDestroy_v2": (HANDLE,),
        "cuThreadExchangeStreamCaptureMode": (INT_OUT,),
        "cuStreamIsCapturing": (HANDLE, INT_OUT),
        "cuStreamGetCaptureInfo_v2": (HANDLE, INT_OUT, SIZE_OUT, OUT, HANDLE, HANDLE),
        "cuUserObjectCreate": (OUT, HANDLE, HANDLE, NUMBER, NUMBER),
        "cuGraphRetainUserObject": (HANDLE, HANDLE, NUMBER, NUMBER),
        "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(TEXT)),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(TEXT)),
    }
    names: ClassVar[dict[str, str]] = {
        "unload": "cuModuleUnload",
        "allocate": "cuMemAlloc_v2",
        "set_bytes": "cuMemsetD8Async",
        "create_stream": "cuStreamCreate",
        "wait": "cuStreamSynchronize",
        "destroy_stream": "cuStreamDestroy_v2",
        "exchange_mode": "cuThreadExchangeStreamCaptureMode",
        "is_capturing": "cuStreamIsCapturing",
        "capture_info": "cuStreamGetCaptureInfo_v2",
        "user_object": "cuUserObjectCreate",
        "graph_keeps": "cuGraphRetainUserObject",
    }

    def __init__(self, library: Any):
        super().__init__(library)
        self.call("cuInit", 0, doing="starting the CUDA driver")

    def describe(self, status: int) -> tuple[str, str]:
        said = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = TEXT()
            getattr(self.library, name)(status, ctypes.byref(text))
            said.append((text.value or b"").decode(errors="replace"))
        return said[0], said[1]

    def hint(self, status: int) -> str:
        return HINTS.get(status, "")

    def device(self) -> int:
        """The device whose context is current on this thread; device 0's becomes so where there is none."""
        if not self._context():
            self.use(0)
        found = ctypes.c_int()
        self.call("cuCtxGetDevice", ctypes.byref(found), doing="asking for the current device")
        return found.value

    def use(self, device: int) -> None:
        """Makes the context of `device` that torch and CUDA's runtime use (its primary one) current on this thread."""
        context, doing = HANDLE(), f"changing to device {device}"
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, doing=doing)
        self.call("cuCtxSetCurrent", context, doing=doing)

    def attribute(self, which: int, device: int) -> int:
        found = ctypes.c_int()
        doing = f"asking about device {device}"
        self.call("cuDeviceGetAttribute", ctypes.byref(found), which, device, doing=doing)
        return found.value

    def arch(self, device: int) -> str:
        """Such as "sm_90"."""
        return "sm_" + "".join(str(self.attribute(a, device)) for a in COMPUTE_CAPABILITY)

    def _context(self) -> int:
        found = HANDLE()
        self.call("cuCtxGetCurrent", ctypes.byref(found), doing="asking for the current context")
        return found.value or 0


@cache
def runtime() -> Cuda:
    """The CUDA driver of this process. CudaError if there is none, or no device."""
    advice = "no CUDA driver: install NVIDIA's driver for this GPU (libcuda.so.1 comes with it)"
    return find(Cuda, LIBRARIES, "cuda", advice)


class CudaKernel(GpuKernel):
    """A loaded sm_90a kernel of one device; see GpuKernel.

    Prepared calls hold their tensor maps: 128 bytes each, made once for an address and sizes."""

    target, threads_most = "sm90a", 2**63 - 1
    driver: Cuda

    def _load(self) -> int:
        code, driver = self.code, self.driver
        device = driver.device()
        doing = f"loading {code.entry} on device {device}"
        arch, wanted = driver.arch(device), code.features.split(",")[0]
        if wanted.endswith("a") and arch != wanted[:-1]:
            raise CudaError(f"{doing}: it is code for {wanted} alone, and the device is {arch}", NO_BINARY)
        most = driver.attribute(SHARED_MOST, device)
        if code.shared_bytes + code.dynamic_bytes > most:
            raise CudaError(
                f"{doing}: it needs {code.shared_bytes + code.dynamic_bytes} bytes of shared memory a workgroup, and "
                f"the device has {most}",
                INVALID_VALUE,
            )
        self._image = ctypes.create_string_buffer(code.binary, len(code.binary) + 1)  # PTX must end in a NUL
        tensor_map.check(driver, code)

        def allow() -> None:
            attributes = {DYNAMIC_SHARED: code.dynamic_bytes} if code.dynamic_bytes else {}
            attributes |= {LARGE_CLUSTER: 1} if code.cluster > CLUSTER_PORTABLE else {}
            for which, value in attributes.items():
                driver.call("cuFuncSetAttribute", self.function, which, value, doing=f"{doing} (attribute {which})")

        with relaxed(driver):
            load_function(self, lambda: self._load_module(doing), "cuModuleGetFunction", allow)
        names = [a.name for a in code.arguments]
        self._mapped = [names.index(t.of) for t in code.tensor_maps]
        self._frame = Frame(CONFIG + CLUSTER + OVERLAP, self.kinds, len(code.tensor_maps))
        self._launch_function = driver.library.cuLaunchKernelEx
        return device

    def _load_module(self, doing: str) -> None:
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (HANDLE * 2)(ctypes.addressof(log), LOG_BYTES)
        try:
            self.driver.call(
                "cuModuleLoadDataEx", ctypes.byref(self._module), self._image, 2, options, values, doing=doing
            )
        except CudaError as e:
            said = log.value.decode(errors="replace").strip()
            raise CudaError(f"{e}{said and '. The driver: ' + said}", e.status) from None

    def _size(self, named: dict[str, Any], grid: tuple[int, int, int]) -> Sized:
        return Sized(named, grid, [tensor_map.Shaped(self.driver, self.code, t, named) for t in self.code.tensor_maps])

    def _call(self, sized: Sized, stream: int, arguments: tuple) -> tuple:
        maps = [m.at(arguments[i]) for m, i in zip(sized.more, self._mapped)]
        code, grid = self.code, sized.grid
        base, memory = self._frame()
        clustered = code.cluster > 1
        attributes = clustered + code.overlaps
        first = base + struct.calcsize(CONFIG if clustered else CONFIG + CLUSTER)
        before = (
            *grid, code.workgroup_size, 1, 1, code.dynamic_bytes, stream, first if attributes else 0, attributes,
            CLUSTER_DIMENSION, code.cluster, 1, 1, PROGRAMMATIC_SERIALIZATION, 1,
        )  # fmt: skip
        self._frame.fill(base, memory, before, arguments, [address for address, _ in maps])
        return base, base + self._frame.pointers, grid, memory, maps

    def _launch(self, call: tuple) -> None:
        status = self._launch_function(call[0], self.function, call[1], None)
        if status:
            if status == INVALID_CONTEXT and not self.driver._context():  # a thread that has not met CUDA yet
                self.driver.use(self.device)
                status = self._launch_function(call[0], self.function, call[1], None)
            if status:
                raise self._refused(status, call[2])

    def _refused(self, status: int, grid: tuple[int, int, int]) -> CudaError:
        made = self.driver.failure("cuLaunchKernelEx", status, f"launching {self.code.entry} on a grid of {grid}")
        if status in STICKY:
            return made  # type: ignore[return-value]
        current = self.driver.device()
        if current != self.device:
            return CudaError(
                f"{self.code.entry} was loaded on device {self.device}, and device {current} is current: {made}", status
            )
        return made  # type: ignore[return-value]


def load(code: CodeObject, driver: Cuda | None = None, device: int | None = None) -> CudaKernel:
    """Loads an sm_90a code object on the current device (or on `device`, which becomes current on this thread).

    CudaError if it is not one, if the device is another or has too little shared memory, or if the driver refuses."""
    driver = driver or runtime()
    if device is not None and driver.device() != device:
        driver.use(device)
    return CudaKernel(code, driver)
