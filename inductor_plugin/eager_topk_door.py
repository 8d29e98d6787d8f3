"""The table behind the door for top-k on GPUs: a small top-k takes the GPU less time than Python takes to look at its
operands, so that machine code does (`flykernels.launch.torch_library.GpuTopkDoor`). Kernels of several workgroups a row
need workspace, which belongs to a stream or a graph: those `GpuTopK` launches, from Python, behind the same table."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flykernels.launch import torch_door
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

from . import eager_code, eager_gate, private
from .devices import Device
from .eager_gate import Candidate, drawn
from .eager_rms_door import DEVICE_TYPE, LAUNCH, LIBRARIES
from .eager_topk import HARD_FROM, NAMES, GpuTopK, _name, as_called, case_of, check, chosen, problem_of

log = logging.getLogger(__name__)

SCHEMAS = (  # what the door calls for kernels that Python launches
    "_topk(Tensor x, int k, int dim, bool largest, bool sorted) -> (Tensor, Tensor)",
    "_topk_values(Tensor x, int k, int dim, bool largest, bool sorted, Tensor(a!) values, Tensor(b!) indices) "
    "-> (Tensor(a!), Tensor(b!))",
)
_serving: dict[str, GpuTopK] = {}  # by dispatch key


@functools.cache
def _library() -> Any:
    library = torch.library.Library("flykernels", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def serve(topk: GpuTopK, key: str) -> None:
    """The operators that the door of a dispatch key calls go to `topk`."""
    names = private.eager()
    keys = names.DispatchKeySet(getattr(names.DispatchKey, key))
    if key not in _serving:
        at = lambda x, values, indices, *how: _serving[key].topk_values(keys, x, *how, values=values, indices=indices)
        _library().impl("_topk", lambda *operands: _serving[key].topk(keys, *operands), key)
        _library().impl("_topk_values", lambda x, k, d, g, s, v, i: at(x, v, i, k, d, g, s), key)
    _serving[key] = topk


class DoorTopK:
    """aten::topk and aten::topk.values on a GPU, behind a door. LaunchError where torch or the driver lack what it
    needs.

    topk: what launches kernels that need workspace"""

    def __init__(self, device: Device, topk: GpuTopK, door: Any = None, key: str = "CUDA"):
        self.device, self.topk = device, topk
        self.door = door or _door(device, self.resolve)
        self.kernels: dict[tuple[str, int], Any] = {}
        serve(topk, key)

    def resolve(self, width: int, k: int, code: int, rows: int) -> str | None:
        """Puts a slot for a call that the table does not know; a message that the call is to fail with, or None."""
        p, number = problem_of(width, k, code, rows)
        put = lambda state, **how: self.door.put(width, k, code, state, **how)
        aten = lambda: put(torch_door.ATEN)
        if p.why_not(self.device):
            aten()
            return None
        case = eager_gate.key_for("topk", "topk", case_of(p), self.device)
        may = not torch.cuda.is_current_stream_capturing()
        measure = lambda: self._measure(case, p, put, number)
        use = lambda won: self._use(p, eager_gate.won(won), won.artefact, put, number)
        return eager_gate.served(f"top {k} of {width}", case, measure, use, aten, may)

    def _use(self, p: TopKProblem, config: dict, artefact: str | None, put: Callable, number: int) -> None:
        won = chosen(p, self.device, config, 1)
        codes = eager_code.codes_for("topk", p, won.key(), self.device.target, artefact)
        rows = rows_together(codes, won, p)
        if rows is None:
            self.topk.prefer(p, won, codes)
            put(torch_door.OURS)
            return
        (code,) = codes
        kernel = self._kernel(code, number)
        put(
            torch_door.OURS, function=kernel.function.value, workgroup=code.workgroup_size, rows=rows,
            shared=code.dynamic_bytes, keep=kernel,
        )  # fmt: skip

    def _kernel(self, code: Any, number: int) -> Any:
        from flykernels.launch.current import load

        key = code.digest, number
        if key not in self.kernels:
            with torch.cuda.device(number):
                self.kernels[key] = load(code)
        return self.kernels[key]

    def _measure(self, case: Any, p: TopKProblem, put: Callable, number: int):
        from flykernels import targets

        target = getattr(targets, self.device.target)
        dtype = next(t for t, name in NAMES.items() if name == p.dtype)
        with torch.cuda.device(number), torch.no_grad():
            x, dim = as_called(p, lambda n: drawn(0, (n,), dtype, "cuda"))
            hard = as_called(p, lambda n: torch.zeros(n, device="cuda", dtype=dtype))[0] if p.k > HARD_FROM else None
            candidates, kept = [], configurations(p, target).kept
            eager_code.build_ahead("topk", [(p, c.config.key()) for c in kept], target.name)
            for c in kept:

                def make(config=c.config):
                    codes = eager_code.codes_for("topk", p, config.key(), target.name)
                    artefact = eager_code.artefact_of(codes)
                    plans: dict[tuple, Any] = {}
                    if rows_together(codes, config, p) is None:
                        for t in (x, *([] if hard is None else [hard])):
                            plans |= self.topk.planned(t, p.k, dim, p.largest, config, codes)

                    def use():
                        if not plans:
                            self._use(p, config.key(), artefact, put, number)
                            return
                        self.topk.plans.update(plans)  # made before: the GPU must not wait for Python
                        put(torch_door.OURS)

                    return Candidate(_name(config), config.key(), artefact, use)

                make.name = _name(c.config)  # type: ignore[attr-defined]
                candidates.append(make)

            def run():
                if hard is not None:  # equal elements cost more where k is large: they count as much as others
                    torch.topk(hard, p.k, dim, p.largest, True)
                return torch.topk(x, p.k, dim, p.largest, True)

            aten = lambda: put(torch_door.ATEN)
            aten()
            want = run()
            return eager_gate.contest(
                case, candidates, run, aten, lambda: check(run(), x, p.k, dim, p.largest, want), torch.cuda.synchronize
            )

    def forget(self) -> None:
        self.door.forget()
        self.topk.forget()


def rows_together(codes: Iterable[Any], config: TopKConfig, p: TopKProblem) -> int | None:
    """Rows that a workgroup works on, of a kernel that the door can launch; None where it cannot: see
    targets/x86_topk_gpu.py."""
    code, *others = codes
    if others or config.split or code.workspace or code.tensor_maps or code.cluster != 1:
        return None
    rows = config.workgroup_size // config.lanes if config.family in ("rows", "rounds") else 1
    for n in (1, p.rows, 5 * p.rows + 3):
        if (*code.grid_for({"rows": n, "width": p.width, "k": p.k}), 1, 1)[:3] != (-(-n // rows), 1, 1):
            return None
    return rows


def _door(device: Device, resolve: Callable) -> Any:
    from flykernels.launch.host import LaunchError
    from flykernels.launch.torch_library import GpuTopkDoor, address_of, libtorch

    wanted = torch_door.STREAM, torch_door.TOPK_CUDA, torch_door.TOPK_OUT_CUDA
    for name in LIBRARIES:
        try:
            library = libtorch(name)
            stream, functional, out = (address_of(getattr(library, symbol)) for symbol in wanted)
            break
        except (LaunchError, AttributeError):
            continue
    else:
        raise LaunchError("torch has no library with ATen's topk for GPUs and the current stream")
    driver, function = LAUNCH[device.target]
    launch = address_of(getattr(ctypes.CDLL(driver), function))
    code = eager_code.door("topk", "x86_topk_door", DEVICE_TYPE["CUDA"], function="build_gpu")
    return GpuTopkDoor(code, resolve, "CUDA", launch, stream, functional, out)
