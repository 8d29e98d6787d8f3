"""A gfx950 code object as a function of tensors on a HIP device, launched on torch's current stream.

The checks are `bind_host`'s, and those of what wide loads need: where pointers and strides are multiples of what the
kernel was built for, and where a tile spans less than a buffer may. Where they do not hold, ATen computes. Tested with
a recording library in the place of HIP: there was no AMD GPU to run it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.launch import hip
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem

from . import bind_host, kernels

log = logging.getLogger(__name__)
SPAN_MOST = 0xFFFFF000  # bytes that a tile of A or B may span: what a buffer descriptor addresses
TILE_MOST = 256  # rows of a tile


def bind(code: CodeObject, spec: kernels.Spec) -> Callable:
    """callable(a, b, [bias], [residual], out=) for `spec`, running `code` or, where operands do not fit, ATen."""
    names = {
        "launch": Launcher(code),
        "aten": kernels.aten(spec),
        "warn": lambda *x: log.warning(
            "%s %s: operands are not laid out as compiled for; ATen serves this call", spec.op, spec.name
        ),
    }
    exec(compile(bind_host.source_of(spec.problem, conditions(spec.problem)), f"<flykernels {spec.op}>", "exec"), names)
    return names["call"]  # type: ignore[return-value]


def conditions(p: GemmProblem) -> list[str]:
    """Under which the kernel must not run: "in terms of" tensors and strides, as `bind_host.source_of` names them."""
    out = []
    for operand, align in (("a", p.align_a), ("b", p.align_b), ("c", p.align_c), ("residual", p.align_c)):
        if operand not in arguments.pointers(p):
            continue
        dtype = p.input_type if operand in ("a", "b") else p.output_type
        tensor = "out" if operand == "c" else operand
        strides = [s for s in arguments.scalars(p) if s.startswith(f"{operand}_")]
        if align > dtype.bytes:
            out += [f"{tensor}.data_ptr() % {align}", *(f"{s} % {align // dtype.bytes}" for s in strides)]
        if operand in ("a", "b"):
            most = SPAN_MOST // (TILE_MOST * dtype.bytes)
            out += [f"{s} > {most}" for s in strides if not s.endswith("_batch")]
    return out


class Launcher:
    """Addresses and scalars -> a launch on the current device and stream. Loads the code once a device.

    Workspace belongs to a kernel, a device and a stream: launches on one stream follow one another, and each leaves its
    counters at 0, as it found them."""

    def __init__(self, code: CodeObject):
        self.code = code
        self.loaded: dict[int, hip.HipKernel] = {}
        self.workspaces: dict[tuple[int, int], Any] = {}
        self.scalars = [a.name for a in code.arguments if a.kind != "pointer"]

    def __call__(self, *arguments: int) -> None:
        import torch

        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream().cuda_stream
        kernel = self.loaded.get(device)
        if kernel is None:
            kernel = self.loaded[device] = hip.load(self.code)
        if self.code.workspace:
            arguments = (*arguments, self.workspace(device, stream, arguments))
        kernel(*arguments, stream=stream)

    def workspace(self, device: int, stream: int, arguments: tuple[int, ...]) -> int:
        """Address of enough zeros, or of what an earlier launch on this stream has left."""
        import torch

        size = self.code.workspace_for(dict(zip(self.scalars, arguments[-len(self.scalars) :], strict=True)))
        held = self.workspaces.get((device, stream))
        if held is None or held.numel() < size:
            held = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
            self.workspaces[device, stream] = held
        return held.data_ptr()
