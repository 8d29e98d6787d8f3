"""Libraries in the place of libamdhip64 and libcuda: ctypes functions that write down each call and read what its
pointers say. Device memory is the host's, so what a call wrote can be looked at."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

NUMBER, HANDLE, TEXT, INT = ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
OUT, INTS, LONGS = ctypes.POINTER(HANDLE), ctypes.POINTER(INT), ctypes.POINTER(ctypes.c_uint64)
MODULE, FUNCTION, STREAM = 0x1000, 0x2000, 0x3000
KINDS = {"pointer": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
NEVER_WRITTEN = 0xA5  # what fresh memory holds


class Recorder:
    """calls: (name, plain arguments) in order. fail: {function: status it returns}. kinds: of a launch's arguments.

    capturing  stream -> (id, graph)
    graphs     graph -> [(address of a user object's data, its destructor)]"""

    shared: dict[str, str]  # our name of what both makers have -> the library's

    def __init__(self, code=None):
        self.calls: list[tuple[str, tuple]] = []
        self.fail: dict[str, int] = {}
        self.current = 0
        self.kinds = [KINDS[a.kind] for a in code.arguments] if code else []
        self.binary_bytes, self.binary = len(code.binary) if code else 0, b""
        self.capturing: dict[int, tuple[int, int]] = {}
        self.graphs: dict[int, list] = {}
        self.mode, self.memory = 0, {}
        self._objects: dict[int, tuple] = {}
        self._keep: list[Any] = []
        for name, body, types in (
            ("allocate", self._allocate, (OUT, ctypes.c_size_t)),
            ("set_bytes", self._set, (HANDLE, ctypes.c_int, ctypes.c_size_t, HANDLE)),
            ("create_stream", self._create_stream, (OUT, NUMBER)),
            ("wait", lambda s: (s,), (HANDLE,)),
            ("destroy_stream", lambda s: (s,), (HANDLE,)),
            ("exchange_mode", self._exchange, (INTS,)),
            ("is_capturing", self._is_capturing, (HANDLE, INTS)),
            ("capture_info", self._info, (HANDLE, INTS, LONGS, OUT, HANDLE, HANDLE)),
            ("user_object", self._object, (OUT, HANDLE, HANDLE, NUMBER, NUMBER)),
            ("graph_keeps", self._graph_keeps, (HANDLE, HANDLE, NUMBER, NUMBER)),
            ("unload", lambda m: (m,), (HANDLE,)),
        ):
            self._function(self.shared[name], body, types)

    def _function(self, name, body, types):
        """A C function pointer: arguments cross the C boundary as they would into the real library."""

        def called(*arguments):
            if status := self.fail.get(name, 0):
                self.calls.append((name, ("failed",)))
                return status
            self.calls.append((name, body(*arguments)))
            return 0

        function = ctypes.CFUNCTYPE(INT, *types)(called)
        self._keep.append(function)
        setattr(self, name, function)

    def named(self, name: str) -> list[tuple]:
        """Arguments of every call of a function; of what both makers have, by our name or theirs."""
        return [arguments for called, arguments in self.calls if called == self.shared.get(name, name)]

    def destroy(self, graph: int) -> None:
        """What the driver does when the last copy of a graph is gone."""
        for data, destructor in self.graphs.pop(graph, []):
            ctypes.CFUNCTYPE(None, HANDLE)(destructor)(data)

    def values(self, arguments) -> list:
        return [k.from_address(arguments[i]).value for i, k in enumerate(self.kinds)]

    def _get(self, out, module, name):
        out[0] = FUNCTION
        return module, name.decode()

    def _allocate(self, out, size):
        room = ctypes.create_string_buffer(bytes([NEVER_WRITTEN]) * size, size)
        out[0] = ctypes.addressof(room)
        self.memory[out[0]] = room
        return size, self.mode

    def _set(self, address, value, size, stream):
        ctypes.memset(address, value, size)
        return address, value, size, stream

    def _create_stream(self, out, flags):
        out[0] = STREAM
        return flags, self.mode

    def _exchange(self, mode):
        self.mode, mode[0] = mode[0], self.mode
        return (self.mode,)

    def _is_capturing(self, stream, status):
        status[0] = int((stream or 0) in self.capturing)
        return (stream or 0,)

    def _info(self, stream, status, number, graph, _dependencies, _count):
        status[0], (number[0], graph[0]) = 1, self.capturing[stream or 0]
        return (stream or 0,)

    def _object(self, out, data, destructor, references, flags):
        out[0] = 0x4000 + len(self._objects)
        self._objects[out[0]] = data, destructor
        return references, flags

    def _graph_keeps(self, graph, made, references, flags):
        self.graphs.setdefault(graph, []).append(self._objects[made])
        return graph, references, flags


class RecordingHip(Recorder):
    NAMES: ClassVar[dict[int, str]] = {
        2: "hipErrorOutOfMemory",
        98: "hipErrorInvalidDeviceFunction",
        209: "hipErrorNoBinaryForGpu",
    }

    def __init__(self, code=None):
        from flykernels.launch.hip import Hip

        self.shared = Hip.names
        super().__init__(code)
        make = self._function
        make("hipModuleLoadData", self._load, (OUT, HANDLE))
        make("hipModuleGetFunction", self._get, (OUT, HANDLE, TEXT))
        make("hipModuleLaunchKernel", self._launch, (HANDLE, *[NUMBER] * 7, HANDLE, OUT, OUT))
        make("hipGetDevice", self._device, (INTS,))
        make("hipSetDevice", self._set_device, (INT,))
        self.hipGetErrorName = lambda status: self.NAMES[status].encode()
        self.hipGetErrorString = lambda status: b"as told to"

    def _load(self, out, image):
        self.binary = ctypes.string_at(image, self.binary_bytes)
        out[0] = MODULE
        return ()

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        return function, (gx, gy, gz), (bx, by, bz), shared, stream or 0, self.values(arguments), bool(extra)

    def _device(self, out):
        out[0] = self.current
        return (self.current,)

    def _set_device(self, device):
        self.current = device
        return (device,)


class Config(ctypes.Structure):
    """cuda.h's CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", NUMBER) for what in ("grid", "block") for axis in "xyz"),
        ("shared", NUMBER), ("stream", HANDLE), ("attributes", HANDLE), ("count", NUMBER),
    )  # fmt: skip


class Attribute(ctypes.Structure):
    """cuda.h's CUlaunchAttribute, with the union's member for a cluster, whose first number is also the flag's."""

    _fields_ = (("id", INT), ("padding", ctypes.c_char * 4), ("cluster", NUMBER * 3), ("rest", ctypes.c_char * 52))


class RecordingCuda(Recorder):
    """contexts: device of each context, which is 0x100 + device; thread: the context that is current (0: none).

    attributes: of every device. log: what the driver says of an image that it refuses. launches as (function, grid,
    block, shared, stream, values, maps, cluster); overlaps: for each launch whether it may overlap the one ahead."""

    NAMES: ClassVar[dict[int, str]] = {
        1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE",
        201: "CUDA_ERROR_INVALID_CONTEXT", 218: "CUDA_ERROR_INVALID_PTX", 400: "CUDA_ERROR_INVALID_HANDLE",
        500: "CUDA_ERROR_NOT_FOUND", 700: "CUDA_ERROR_ILLEGAL_ADDRESS",
        906: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", 901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    }  # fmt: skip

    def __init__(self, code=None):
        from flykernels.launch.cuda import Cuda

        self.shared = Cuda.names
        super().__init__(code)
        self.thread, self.maps = 0x100, len(code.tensor_maps) if code else 0
        self.attributes, self.log = {75: 9, 76: 0, 97: 232448}, b""
        self.overlaps: list[list[int]] = []
        make = self._function
        make("cuInit", lambda flags: (flags,), (NUMBER,))
        make("cuCtxGetCurrent", self._get_context, (OUT,))
        make("cuCtxSetCurrent", self._set_context, (HANDLE,))
        make("cuCtxGetDevice", self._device, (INTS,))
        make("cuDevicePrimaryCtxRetain", self._retain, (OUT, INT))
        make("cuDeviceGetAttribute", self._attribute, (INTS, INT, INT))
        make("cuModuleLoadDataEx", self._load, (OUT, HANDLE, NUMBER, INTS, OUT))
        make("cuModuleGetFunction", self._get, (OUT, HANDLE, TEXT))
        make("cuFuncSetAttribute", lambda *a: a, (HANDLE, INT, INT))
        make("cuLaunchKernelEx", self._launch, (HANDLE, HANDLE, OUT, HANDLE))
        make(
            "cuTensorMapEncodeTiled",
            self._encode,
            (HANDLE, INT, NUMBER, HANDLE, LONGS, LONGS, *[HANDLE] * 2, *[INT] * 4),
        )
        self.cuGetErrorName = lambda status, out: self._say(out, self.NAMES[status].encode())
        self.cuGetErrorString = lambda status, out: self._say(out, b"as told to")

    def _say(self, out, text):
        out._obj.value = text
        return 0

    def _load(self, out, image, count, options, values):
        self.binary = ctypes.string_at(image, self.binary_bytes + 1)
        out[0] = MODULE
        return [options[i] for i in range(count)], self.mode

    def _get_context(self, out):
        out[0] = self.thread
        return ()

    def _set_context(self, context):
        self.thread = context or 0
        return (self.thread,)

    def _retain(self, out, device):
        out[0] = 0x100 + device
        return (device,)

    def _device(self, out):
        out[0] = self.thread - 0x100
        return ()

    def _attribute(self, out, which, device):
        out[0] = self.attributes[which]
        return which, device

    def _encode(self, at, kind, rank, address, sizes, steps, box, each, interleave, swizzle, promotion, fill):
        numbers = lambda p, n: list((ctypes.c_uint32 * n).from_address(p))
        assert at % 64 == 0 and interleave == 0 and fill == 0
        ctypes.memset(at, 0x5A, 128)
        ctypes.c_uint64.from_address(at).value = address or 0
        found = sizes[:rank], steps[: rank - 1], numbers(box, rank), numbers(each, rank)
        return kind, address, *found, swizzle, promotion

    def _launch(self, config, function, arguments, extra):
        c = Config.from_address(config)
        size = ctypes.sizeof(Attribute)
        given = [Attribute.from_address(c.attributes + i * size) for i in range(c.count)]
        cluster = next(((a.id, list(a.cluster)) for a in given if a.id == 4), None)
        self.overlaps.append([a.cluster[0] for a in given if a.id == 6])
        assert {a.id for a in given} <= {4, 6}
        maps = [ctypes.c_uint64.from_address(arguments[len(self.kinds) + i]).value for i in range(self.maps)]
        assert not extra
        return (
            function, (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z), c.shared, c.stream or 0,
            self.values(arguments), maps, cluster,
        )  # fmt: skip
