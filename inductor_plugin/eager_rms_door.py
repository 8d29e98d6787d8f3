"""The table behind the door for RMSNorm's forward on GPUs: a small RMSNorm takes the GPU less time than Python takes to
look at its operands, so that machine code does (`flykernels.launch.torch_library.RmsNormDoor`)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from flykernels.launch import torch_door
from templates.rms_norm.config import config_from_key
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

from . import eager_code, eager_gate
from .devices import Device
from .eager_gate import Candidate
from .eager_rms import NAMES, _name, case_of, compare

log = logging.getLogger(__name__)

NUMBERS = {torch_door.F32: torch.float32, torch_door.BF16: torch.bfloat16, torch_door.F16: torch.float16}
LAUNCH = {"sm90a": ("libcuda.so.1", "cuLaunchKernel"), "gfx950": ("libamdhip64.so", "hipModuleLaunchKernel")}
DEVICE_TYPE = {"CPU": 0, "CUDA": 1}  # DeviceType's numbers (c10/core/DeviceType.h); HIP devices are CUDA's to torch
LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")  # where ATen's function and the current stream are
EPS = 1e-6  # of calls that are measured


class GpuRMSNormForward:
    """aten::_fused_rms_norm on a GPU, behind a door. LaunchError where torch or the driver lack what it needs."""

    def __init__(self, device: Device, door: Any = None):
        self.device = device
        self.door = door or _door(device, self.resolve)
        self.kernels: dict[tuple[str, int], Any] = {}

    def resolve(self, width: int, exponent: int, code: int, rows: int) -> str | None:
        """Puts a slot for a call that the table does not know; a message that the call is to fail with, or None."""
        dtype, weight = NUMBERS[code & 0xFF], NUMBERS.get(code >> torch_door.WEIGHT_SHIFT & 0xFF)
        align, number = code >> torch_door.ALIGN_SHIFT & 0xFFFF, code >> torch_door.DEVICE_SHIFT
        put = lambda state, **how: self.door.put(width, exponent, code, state, **how)
        p = RMSNormProblem(
            width, NAMES[dtype], NAMES[weight] if weight else "none", rstd=True,
            align=max(align, dtype.itemsize), rows_hint=rows,
        )  # fmt: skip
        if p.why_not(self.device):
            put(torch_door.ATEN)
            return None
        case = eager_gate.key_for("rms_norm", "rms_norm", case_of(p, False, False), self.device)
        try:
            may = not torch.cuda.is_current_stream_capturing()
            decided, for_good = eager_gate.decide(case, lambda: self._measure(case, p, put, rows, number), may)
            if decided is not None:
                self._use(p, decided.config["forward"], decided.artefact, put, number)
            elif for_good:
                put(torch_door.ATEN)
        except eager_gate.PinnedMiss as e:
            return str(e)
        except Exception as e:
            log.warning("rms_norm of %d x %d: no kernel (%s: %s); ATen serves it", rows, width, type(e).__name__, e)
            put(torch_door.ATEN)
        return None

    def _use(self, p: RMSNormProblem, config: dict, artefact: str | None, put: Callable, number: int) -> None:
        codes = eager_code.codes_for("rms_norm", p, config, self.device.target, artefact)
        why = unsuited(codes, config, p)
        if why:
            raise ValueError(why)
        key = codes[0].digest, number
        kernel = self.kernels.get(key)
        if kernel is None:
            from flykernels.launch.current import load

            kernel = self.kernels[key] = load(codes[0])
        tile, parts = config["rows_per_workgroup"], config["parts"] or 2**31 - 1
        put(
            torch_door.OURS, function=kernel.function.value, workgroup=codes[0].workgroup_size, tile=tile, parts_most=parts,
            keep=kernel,
        )  # fmt: skip

    def _measure(self, case: Any, p: RMSNormProblem, put: Callable, rows: int, number: int):
        from flykernels import targets

        target = getattr(targets, self.device.target)
        types = {name: dtype for dtype, name in NAMES.items()}
        width: int = p.width  # type: ignore[assignment]
        where = {"device": f"cuda:{number}"}
        off = 0 if p.align >= 16 else p.align // types[p.dtype].itemsize
        x = torch.randn(rows * width + off, **where).to(types[p.dtype])[off:].view(rows, width)
        weight = None if p.weight_dtype == "none" else torch.randn(width, **where).to(types[p.weight_dtype])
        candidates = []
        for c in configurations(p, target).kept:
            config = c.config.key()
            if config.get("slices", 1) > 1:
                continue

            def make(config=config):
                codes = eager_code.codes_for("rms_norm", p, config, target.name)
                artefact = eager_code.artefact_of(codes)
                use = lambda: self._use(p, config, artefact, put, number)
                return Candidate(_name(config), {"forward": config}, artefact, use)

            make.name = _name(config)  # type: ignore[attr-defined]
            candidates.append(make)
        run = lambda: torch.ops.aten._fused_rms_norm(x, [width], weight, EPS)
        aten = lambda: put(torch_door.ATEN)
        with torch.no_grad():
            aten()
            want = run()
            return eager_gate.contest(
                case, candidates, run, aten, lambda: compare(run(), want, width, rows), torch.cuda.synchronize
            )

    def forget(self) -> None:
        self.door.forget()


def unsuited(codes: Any, config: dict, p: RMSNormProblem) -> str | None:
    """Why the door cannot launch a kernel, or None: see targets/x86_rms_door.py."""
    if len(codes) != 1:
        return f"{len(codes)} code objects"
    (code,) = codes
    if code.workspace or code.tensor_maps or code.cluster != 1 or code.dynamic_bytes or eager_code.takes_workspace(codes):
        return "a workspace, tensor maps, a cluster or dynamic shared memory"
    for rows in (1, p.rows_hint, 5 * p.rows_hint + 3):
        parts = config_from_key(code.target, config).parts_for(rows, p.width or 1)
        tiles = -(-rows // config["rows_per_workgroup"])
        grid = code.grid_for({"rows": rows, "width": p.width or 1, "parts": parts})
        if (*grid, 1, 1)[:3] != (parts, 1, 1) or parts != min(tiles, config["parts"] or tiles):
            return f"a grid of {grid} for {rows} rows"
    return None


def _door(device: Device, resolve: Callable) -> Any:
    from flykernels.launch.host import LaunchError
    from flykernels.launch.torch_library import RmsNormDoor, address_of, libtorch

    found: dict[str, int] = {}
    for name in LIBRARIES:
        try:
            library = libtorch(name)
            for symbol in (torch_door.STREAM, torch_door.RMS_NORM["CUDA"]):
                found[symbol] = address_of(getattr(library, symbol))
            break
        except (LaunchError, AttributeError):
            continue
    else:
        raise LaunchError("torch has no library with ATen's RMSNorm for GPUs and the current stream")
    driver, function = LAUNCH[device.target]
    launch = address_of(getattr(ctypes.CDLL(driver), function))
    code = eager_code.door("rms_norm", "x86_rms_door", DEVICE_TYPE["CUDA"])
    return RmsNormDoor(
        code, resolve, "CUDA", launch, found[torch_door.STREAM], found[torch_door.RMS_NORM["CUDA"]]
    )
