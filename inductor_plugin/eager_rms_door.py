"""The table behind the door for RMSNorm on GPUs: a small RMSNorm takes the GPU less time than Python takes to
look at its operands, so that machine code does (`flykernels.launch.torch_library.RmsNormDoor`)."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch

from flykernels.launch import torch_door
from templates.rms_norm.config import GpuConfig, config_from_key
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

from . import eager_code, eager_gate
from .devices import Device
from .eager_gate import Candidate, drawn
from .eager_rms import RMSNorm
from .eager_rms_call import NAMES, NUMBERS, TYPES, case_of, compare, gradient_sizes, name_of
from .strides import WIDEST

log = logging.getLogger(__name__)

LAUNCH = {"sm90a": ("libcuda.so.1", "cuLaunchKernel"), "gfx950": ("libamdhip64.so", "hipModuleLaunchKernel")}
DEVICE_TYPE = {"CPU": 0, "CUDA": 1}  # DeviceType's numbers (c10/core/DeviceType.h); HIP devices are CUDA's to torch
LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")  # where ATen's function and the current stream are
EPS = 1e-6  # of calls that are measured
MOST_LAUNCHES = 3  # of a kernel


class GpuRMSNorm:
    """aten::_fused_rms_norm and its backward on a GPU, behind a door. LaunchError where torch or the driver lack what
    it needs.

    rms: what serves the gradients that the door does not"""

    def __init__(self, device: Device, rms: RMSNorm, door: Any = None):
        self.device, self.rms = device, rms
        self.door = door or _door(device, self.resolve)
        self.kernels: dict[tuple[str, int], Any] = {}
        rms.serve_doors()

    def resolve(self, width: int, exponent: int, code: int, rows: int) -> str | None:
        """Puts a slot for a call that the table does not know; a message that the call is to fail with, or None."""
        dtype, weight = NUMBERS[code & 0xFF], NUMBERS.get(code >> torch_door.WEIGHT_SHIFT & 0xFF)
        align, number = code >> torch_door.ALIGN_SHIFT & 0xFF, code >> torch_door.DEVICE_SHIFT
        back, weight_gradient = (
            bool(code >> bit & 1) for bit in (torch_door.BACKWARD_BIT, torch_door.WEIGHT_GRADIENT_BIT)
        )
        put = lambda state, **how: self.door.put(width, exponent, code, state, **how)
        p = RMSNormProblem(
            width, NAMES[dtype], NAMES[weight] if weight else "none", rstd=True,
            align=max(align, dtype.itemsize), rows_hint=rows,
        )  # fmt: skip
        p = self.rms.gradient_problem(p, weight_gradient) if back else p
        aten = lambda: put(torch_door.ATEN)
        if p.why_not(self.device):
            aten()
            return None
        case, may = self.case(p), not torch.cuda.is_current_stream_capturing()
        measure = lambda: self._measure(case, p, put, number)
        use = lambda won: self._use(p, eager_gate.won(won)[p.direction], won.artefact, put, number)
        return eager_gate.served(f"rms_norm of {rows} x {width}", case, measure, use, aten, may)

    def case(self, p: RMSNormProblem) -> Any:
        """The tuning cache's key; the same as where Python looks calls up."""
        problem = case_of(p, False, p.backward) | ({"weight_gradient": p.weight_gradient} if p.backward else {})
        return eager_gate.key_for(f"rms_norm{'_backward' if p.backward else ''}", "rms_norm", problem, self.device)

    def _use(self, p: RMSNormProblem, config: dict, artefact: str | None, put: Callable, number: int) -> None:
        codes = eager_code.codes_for("rms_norm", p, config, self.device.target, artefact)
        why = unsuited(codes, config, p)
        if why:
            raise ValueError(why)
        first, *others = kernels = [self._kernel(code, number) for code in codes]
        grids = [code.grid_for(_sizes(p, config, 1))[0] for code in codes[1:]]
        after = [(kernel.function.value, code.workgroup_size, n) for kernel, code, n in zip(others, codes[1:], grids)]
        chosen, width = config_from_key(codes[0].target, config), p.width or 1
        space = chosen.workspace_bytes(1, width, 1) if eager_code.takes_workspace(codes) else 0
        put(
            torch_door.OURS, function=first.function.value, workgroup=codes[0].workgroup_size,
            tile=config["rows_per_workgroup"], parts_most=config["parts"] or 2**31 - 1, after=after, part_bytes=space,
            keep=kernels,
        )  # fmt: skip

    def _kernel(self, code: Any, number: int) -> Any:
        key = code.digest, number
        kernel = self.kernels.get(key)
        if kernel is None:
            from flykernels.launch.current import load

            with torch.cuda.device(number):
                kernel = self.kernels[key] = load(code)
        return kernel

    def _measure(self, case: Any, p: RMSNormProblem, put: Callable, number: int):
        from flykernels import targets

        target = getattr(targets, self.device.target)
        width, rows, kind = p.width or 1, p.rows_hint, TYPES[p.dtype]
        off = 0 if p.align >= WIDEST else p.align // kind.itemsize
        with torch.cuda.device(number), torch.no_grad():
            draw = lambda seed: drawn(seed, (rows * width + off,), kind, "cuda")[off:].view(rows, width)
            x = draw(0)
            weight = None if p.weight_dtype == "none" else drawn(1, (width,), TYPES[p.weight_dtype], "cuda")
            candidates, kept = [], [c.config.key() for c in configurations(p, target).kept]
            kept = [config for config in kept if config.get("slices", 1) == 1]
            eager_code.build_ahead("rms_norm", [(p, config) for config in kept], target.name)
            for config in kept:

                def make(config=config):
                    codes = eager_code.codes_for("rms_norm", p, config, target.name)
                    artefact = eager_code.artefact_of(codes)
                    use = lambda: self._use(p, config, artefact, put, number)
                    return Candidate(name_of(config), {p.direction: config}, artefact, use)

                make.name = name_of(config)  # type: ignore[attr-defined]
                candidates.append(make)
            least: tuple[Any, ...] = ()
            if p.backward:
                rstd = (x.float().pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
                operands = draw(2), x, [width], rstd, weight, [True, p.weight_gradient]
                once = run = lambda: torch.ops.aten._fused_rms_norm_backward(*operands)
                least = gradient_sizes(*operands[:5])
            else:  # what L2 does not hold is other data each time, as in a model: some of the last call's stays there
                in_turn = itertools.cycle([x, draw(2)] if 0 < target.limits.l2_bytes < x.nbytes else [x])
                once = lambda: torch.ops.aten._fused_rms_norm(x, [width], weight, EPS)
                run = lambda: torch.ops.aten._fused_rms_norm(next(in_turn), [width], weight, EPS)
            aten = lambda: put(torch_door.ATEN)
            aten()
            want = once()
            return eager_gate.contest(
                case, candidates, run, aten, lambda: compare(once(), want, width, rows, least), torch.cuda.synchronize
            )

    def forget(self) -> None:
        self.door.forget()


def unsuited(codes: Any, config: dict, p: RMSNormProblem) -> str | None:
    """Why the door cannot launch a kernel, or None: see targets/x86_rms_door.py."""
    if len(codes) > (MOST_LAUNCHES if p.backward else 1):
        return f"{len(codes)} code objects"
    if any(c.workspace or c.tensor_maps or c.cluster != 1 or c.dynamic_bytes for c in codes):
        return "a workspace of its own, tensor maps, a cluster or dynamic shared memory"
    takes = eager_code.takes_workspace(codes)
    if takes and not p.backward:
        return "a workspace"
    chosen, once, width = config_from_key(codes[0].target, config), _sizes(p, config, 1), p.width or 1
    for rows in (1, p.rows_hint, 5 * p.rows_hint + 3):
        sizes = _sizes(p, config, rows)
        tiles, parts = -(-rows // config["rows_per_workgroup"]), sizes["parts"]
        grids = [(*code.grid_for(sizes), 1, 1)[:3] for code in codes]
        across = [code.grid_for(once)[0] for code in codes]
        wanted = [(parts, 1, 1), *((n, 1, 1) for n in across[1:])]
        if len(codes) == MOST_LAUNCHES:
            wanted[1] = (across[1], parts, 1)
        if grids != wanted or parts != min(tiles, config["parts"] or tiles):
            return f"grids of {grids} for {rows} rows"
        if takes and chosen.workspace_bytes(rows, width, parts) != parts * chosen.workspace_bytes(1, width, 1):
            return "a workspace that does not grow with parts"
    return None


def _sizes(p: RMSNormProblem, config: dict, rows: int) -> dict[str, int]:
    """What grids depend on."""
    parts = GpuConfig(**config).parts_for(rows, p.width or 1)
    return {"rows": rows, "width": p.width or 1, "parts": parts}


def _door(device: Device, resolve: Callable) -> Any:
    from flykernels.launch.host import LaunchError
    from flykernels.launch.torch_library import RmsNormDoor, address_of, libtorch

    found: dict[str, int] = {}
    wanted = torch_door.STREAM, torch_door.RMS_NORM, torch_door.RMS_NORM_BACKWARD
    for name in LIBRARIES:
        try:
            library = libtorch(name)
            for symbol in wanted:
                found[symbol] = address_of(getattr(library, symbol))
            break
        except (LaunchError, AttributeError):
            continue
    else:
        raise LaunchError("torch has no library with ATen's RMSNorm for GPUs and the current stream")
    driver, function = LAUNCH[device.target]
    launch = address_of(getattr(ctypes.CDLL(driver), function))
    code = eager_code.door("rms_norm", "x86_rms_door", DEVICE_TYPE["CUDA"])
    stream, forward, backward = (found[symbol] for symbol in wanted)
    return RmsNormDoor(code, resolve, "CUDA", launch, stream, forward, backward)
