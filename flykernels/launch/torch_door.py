"""What the door from PyTorch's dispatcher (targets/x86_topk_door.py) and whoever fills its tables agree on.

Every function by its C name; those of PyTorch's C interface are declared in torch/csrc/inductor/aoti_torch/c/shim.h and
do not change between releases. The two of C++ are of ATen's public header ATen/ops/topk_cpu_dispatch.h.
"""

from __future__ import annotations

import enum

TABLE = "flykernels_torch"  # the symbol of the table of addresses
CURRENT = "aoti_torch_get_current_device_index"
SHIM = (  # each returns an i32 that is 0 on success
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_copy_",
    "aoti_torch_delete_tensor_object",
    "torch_get_num_threads",  # also makes a thread that is new to torch use as many
    "torch_list_size",
    "torch_list_get_item",
    "torch_delete_list",
    "aoti_torch_get_device_index",
    CURRENT,
    "aoti_torch_new_uninitialized_tensor",
    "aoti_torch_call_dispatcher",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
)
RAISE = "aoti_torch_check"  # (false, function, file, line, message) throws c10::Error: RuntimeError in Python
TOPK = "_ZN2at3cpu4topkERKNS_6TensorEllbb"  # at::cpu::topk(self, k, dim, largest, sorted)
TOPK_OUT = "_ZN2at3cpu8topk_outERNS_6TensorES2_RKS1_llbb"  # at::cpu::topk_out(values, indices, self, k, ...)
TOPK_CUDA, TOPK_OUT_CUDA = (name.replace("3cpu", "4cuda") for name in (TOPK, TOPK_OUT))  # what a GPU's door calls
LIBC = ("aligned_alloc", "malloc", "free", "memset")
# resolve: Python's function; slots: where the table's address is kept. The table: its number of slots - 1, then slots.
# launch: cuLaunchKernel or hipModuleLaunchKernel; rms_norm: ATen's function for the device. A door calls some of these.
STREAM = "aoti_torch_get_current_cuda_stream"
# What a door on an autograd key asks: whether a dispatch mode is on, functorch is at work, a tensor's class looks at
# operators (c10/core/impl/TorchDispatchModeTLS.h, ATen/functorch/DynamicLayer.h, ATen/core/TorchDispatchUtils.h), and
# whether a gradient is wanted (c10/core/GradMode.h, TensorImpl.h).
MODES, LAYERS = "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", "_ZN2at9functorch20getDynamicLayerStackEv"
LOOKS_ON = "_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE"
GRAD_MODE, REQUIRES_GRAD = "_ZN3c108GradMode10is_enabledEv", "_ZNK3c1010TensorImpl13requires_gradEv"
# A tensor's tangent (a pointer to it; UNDEFINED: what stands for none), and whether it is of inference mode and cannot
# be kept for a gradient (c10/core/TensorImpl.h, UndefinedTensorImpl.h, ATen/ops/is_inference_native.h).
TANGENT, UNDEFINED = "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE", "_ZN3c1019UndefinedTensorImpl10_singletonE"
INFERENCE = "_ZN2at6native12is_inferenceERKNS_6TensorE"
_ARGUMENTS = (
    "KNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ES7_IdE"  # (Tensor, ArrayRef, optional<Tensor>, optional<double>)
)
COMPOSED = f"_ZN2at25compositeimplicitautograd15_fused_rms_normER{_ARGUMENTS}"  # what ATen does on the CPU
CHECKED = f"_ZN2at25compositeimplicitautograd8rms_normER{_ARGUMENTS}"  # with the user's arguments checked first
DISPATCHED = "_ZN2at4_ops15_fused_rms_norm4callERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS2_ES8_IdE"
ROUTER = (
    MODES, LAYERS, LOOKS_ON, GRAD_MODE, REQUIRES_GRAD, TANGENT, UNDEFINED, INFERENCE, COMPOSED, CHECKED, DISPATCHED,
)  # fmt: skip
# ATen's functions on a GPU; `rms_norm` and `rms_norm_backward` in the table.
RMS_NORM = f"_ZN2at4cuda15_fused_rms_normER{_ARGUMENTS}"
RMS_NORM_BACKWARD = (
    "_ZN2at4cuda24_fused_rms_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_RKSt8optionalIS1_ESt5arrayIbLm2EE"
)
OUTSIDE = (
    *SHIM, RAISE, TOPK, TOPK_OUT, STREAM, *LIBC, *ROUTER, "omp_get_max_threads", "launch", "rms_norm",
    "rms_norm_backward", "resolve", "slots",
)  # fmt: skip
RUNTIME = {"__gxx_personality_v0": "libstdc++.so.6", "_Unwind_Resume": "libgcc_s.so.1"}  # of C++ exceptions

DIMENSIONS_MOST = 16  # of a tensor that is looked up; ATen serves others
PROBES = 8  # slots that a lookup looks at
ELEMENTS_MOST = 2**31 - 1


class Slot(enum.IntEnum):
    """A slot's words of 8 bytes. `state` is written last. A slot that is taken keeps its key; `state` may change
    between ATEN and OURS, and `words` to other words that never change: what a call reads of a slot always fits
    together."""

    STATE = 0
    WIDTH = 1
    K = 2  # of RMSNorm: rows, as the exponent of a power of two
    CODE = 3  # see `code_of`, `rms_code_of`
    WORDS = 4  # address of TopkWords or RmsWords


class TopkWords(enum.IntEnum):
    """Who serves a top-k, in words of 8 bytes."""

    KERNEL = 0  # address of a kernel's C entry
    THREADS = 1  # the most to use
    PARTS = 2  # argument of a split kernel; 0: not split
    WORKSPACE = 3  # bytes of zeros that a split kernel is handed, for each row
    PRIVATE = 4  # bytes of private memory, for each thread


class TopkGpuWords(enum.IntEnum):
    """Who serves a top-k on a GPU, in words of 8 bytes."""

    FUNCTION = 0  # the driver's handle; 0: Python launches
    WORKGROUP = 1  # threads
    ROWS = 2  # that a workgroup works on
    SHARED = 3  # bytes of memory of a workgroup that the launch asks for


class RmsWords(enum.IntEnum):
    """Who serves an RMSNorm or its gradient on a GPU, in words of 8 bytes."""

    FUNCTION = 0  # the driver's handle
    WORKGROUP = 1  # threads
    TILE = 2  # rows that a workgroup works on at a time
    PARTS_MOST = 3  # workgroups
    SECOND = 4  # handle of what is launched after it, for each part where there is a third; 0: nothing
    SECOND_WORKGROUP = 5
    SECOND_GRID = 6  # workgroups of it
    THIRD = 7
    THIRD_WORKGROUP = 8
    THIRD_GRID = 9
    PART_BYTES = 10  # of workspace, for each part; 0: none


class RmsHostWords(enum.IntEnum):
    """Who serves an RMSNorm or its gradient on the CPU, in words of 8 bytes."""

    KERNEL = 0  # address of a kernel's C entry
    WORK = 1  # elements that are worth a part of their own
    SECOND = 2  # address of what is called after it; 0: nothing
    PART_BYTES = 3  # of workspace, for each part; 0: none


SLOT_WORDS = 8
EMPTY, ATEN, OURS = 0, 1, 2

# ScalarType's numbers, which are part of serialized files (c10/core/ScalarType.h).
U8, I8, I16, I32, I64, F16, F32, F64, BF16 = *range(8), 15
LOG2_BYTES = {U8: 0, I8: 0, I16: 1, I32: 2, I64: 3, F16: 1, F32: 2, F64: 3, BF16: 1}
FLOATS = (F16, F32, BF16)  # that kernels of RMSNorm take; those of top-k take all
CPU = 0  # DeviceType's number

LARGEST_BIT, MISALIGNED_BIT, ANY_BIT, ROWS_SHIFT, THREADS_SHIFT = 8, 9, 10, 16, 32


def code_of(scalar_type: int, largest: bool, misaligned: bool, rows: int, threads: int, anywhere: bool = False) -> int:
    """What a slot holds of a call besides width and k: rows by powers of two. anywhere: rows have strides."""
    bucket = max(0, rows - 1).bit_length()
    flags = largest << LARGEST_BIT | misaligned << MISALIGNED_BIT | anywhere << ANY_BIT
    return scalar_type | flags | bucket << ROWS_SHIFT | threads << THREADS_SHIFT


MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # odd, with well-mixed bits
HASH_SHIFT = 40


def first_probe(width: int, k: int, code: int) -> int:
    """Where a lookup starts, before the mask."""
    product = (width * MULTIPLIERS[0] ^ k * MULTIPLIERS[1] ^ code * MULTIPLIERS[2]) & (2**64 - 1)
    return product >> HASH_SHIFT


# Of RMSNorm: scalar type, the weight's above it; on a GPU then alignment in bytes and the device's number, on the CPU
# whether a gradient is wanted and threads; and what is computed.
WEIGHT_SHIFT, ALIGN_SHIFT, DEVICE_SHIFT = 8, 16, 32
BACKWARD_BIT, WEIGHT_GRADIENT_BIT = 24, 25
NO_WEIGHT = 0xFF
EPS_BITS = 0x34000000  # of float32's epsilon, 2**-23, which ATen takes for eps=None


def rms_code_of(
    scalar_type: int, weight_type: int, align: int, device: int, backward: bool = False, weight_gradient: bool = False
) -> int:
    """What a slot of RMSNorm holds of a call besides width and rows. On the CPU align stands for: a gradient is wanted;
    device for: threads."""
    what = backward << BACKWARD_BIT | weight_gradient << WEIGHT_GRADIENT_BIT
    return scalar_type | weight_type << WEIGHT_SHIFT | align << ALIGN_SHIFT | device << DEVICE_SHIFT | what
