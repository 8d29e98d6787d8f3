"""aten::topk and aten::topk.values on kernels of templates/topk.

On the CPU a small call takes ATen some microseconds, less than a kernel registered from Python adds, so that the
dispatcher calls machine code instead (`flykernels.launch.torch_library`): it looks a call up in a table, which is
filled from here when a call is met that it does not know. On GPUs the functions below are registered.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flykernels.dtypes import dtype as element_type
from flykernels.launch import torch_door
from templates.topk.arguments import scalar_values, slot_bytes
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

from . import eager_code, eager_gate, private
from .devices import Device
from .eager_gate import Candidate, Wrong, bucket, drawn
from .strides import WIDEST

log = logging.getLogger(__name__)

PLANS_MOST = 4096
MISSING = object()
NUMBERS = {  # of the types that torch.topk takes: on a GPU kernels take the first three
    torch_door.F32: torch.float32, torch_door.BF16: torch.bfloat16, torch_door.F16: torch.float16,
    torch_door.F64: torch.float64, torch_door.I64: torch.int64, torch_door.I32: torch.int32,
    torch_door.I16: torch.int16, torch_door.I8: torch.int8, torch_door.U8: torch.uint8,
}  # fmt: skip
NAMES = {kind: element_type(str(kind)).name for kind in NUMBERS.values()}
HARD_FROM = 128  # a larger k is also measured on data made to be hard
CHECKED_ROWS = 256  # of a case, against a stable sort: more would take longer than the measurement


def problem_of(width: int, k: int, code: int, rows: int) -> tuple[TopKProblem, int]:
    """The problem that a door asks about, and the number behind its code's bits: threads, or which GPU it is."""
    bit = lambda at: bool(code >> at & 1)
    dtype, layout = NUMBERS[code & 0xFF], "any" if bit(torch_door.ANY_BIT) else "last"
    align = dtype.itemsize if bit(torch_door.MISALIGNED_BIT) else WIDEST
    p = TopKProblem(rows, width, k, NAMES[dtype], bit(torch_door.LARGEST_BIT), layout=layout, align=align)
    return p, code >> torch_door.THREADS_SHIFT


def case_of(p: TopKProblem) -> dict:
    """The bucket that a problem belongs to, as the cache's key holds it."""
    return {
        "dtype": p.dtype, "largest": p.largest, "layout": p.layout, "wide": p.wide,
        "rows": bucket(p.rows), "width": bucket(p.width), "k": bucket(p.k),
    }  # fmt: skip


def chosen(p: TopKProblem, device: Device, config: dict, threads: int) -> TopKConfig:
    """The configuration a case decided for, with what this very call launches it with."""
    won = TopKConfig(**config)
    if device.target != "x86":
        return won
    for c in configurations(p, device, threads).kept:
        if c.config.code_key() == won.code_key():
            return c.config
    return won


def check(got: Sequence[Any], x: Any, k: int, dim: int, largest: bool, aten: Sequence[Any]) -> None:
    """Values are ATen's, bit for bit where numbers are unequal; indices are those of a stable sort. Raises Wrong.

    On a GPU ATen sorts many results so that negative NaNs come last, few so that they come first with all NaNs, as
    everywhere else (pytorch#117617). A row in which it returns NaNs is judged by the stable sort alone."""
    values, indices = got
    want = aten[0]
    if values.shape != want.shape or values.dtype != want.dtype or indices.shape != want.shape:
        raise Wrong("values are not of ATen's shape and type")
    same = (values == want) | want.isnan().any(dim, keepdim=True)
    found = x.gather(dim, indices.clamp(0, max(0, x.shape[dim] - 1)))
    if not bool((same & ((values == found) | (values.isnan() & found.isnan()))).all()):
        raise Wrong("values differ from ATen's")
    lines = x.movedim(dim, -1).reshape(-1, x.shape[dim])[:CHECKED_ROWS]
    if x.dtype.is_floating_point:
        lines = torch.where(lines.isnan(), torch.nan, lines)  # torch's sort on a GPU takes negative NaNs for the least
    order = torch.sort(lines, dim=-1, descending=largest, stable=True).indices[:, :k]
    if not bool((indices.movedim(dim, -1).reshape(-1, k)[:CHECKED_ROWS] == order).all()):
        raise Wrong("indices are not those of the first of equal elements")


def as_called(p: TopKProblem, make: Callable[[int], Any]) -> tuple[Any, int]:
    """(x, dimension) of a call that the door takes for this problem: of its slot. make(n): n numbers."""
    if p.layout == "any":
        beside = max(2, p.rows)  # what lies between a row's elements
        return make(p.width * beside).view(p.width, beside)[:, : p.rows], 0
    unit = max(1, p.align // p.element.bytes) if p.align >= WIDEST else 1
    step, off = -(-p.width // unit) * unit if p.rows > 1 else p.width, 0 if p.align >= WIDEST else 1
    return make(p.rows * step + off)[off:].view(p.rows, step)[:, : p.width], -1


class CpuTopK:
    """The table behind the door on the CPU."""

    def __init__(self, device: Device):
        from flykernels.launch.torch_library import TopkDoor

        self.device = device
        self.door = TopkDoor(eager_code.door("topk", "x86_topk_door"), self.resolve)

    def resolve(self, width: int, k: int, code: int, rows: int) -> str | None:
        """Puts a slot for a call that the table does not know; a message that the call is to fail with, or None."""
        p, threads = problem_of(width, k, code, rows)
        put = lambda state, **how: self.door.put(width, k, code, state, **how)
        aten = lambda: put(torch_door.ATEN)
        if p.why_not(self.device):
            aten()
            return None
        case = eager_gate.key_for("topk", "topk", case_of(p), self.device)
        measure = lambda: self._measure(case, p, put, threads)
        use = lambda won: self._use(p, eager_gate.won(won), won.artefact, put, threads)
        return eager_gate.served(f"top {k} of {width}", case, measure, use, aten)

    def _use(self, p: TopKProblem, config: dict, artefact: str | None, put: Callable, threads: int) -> None:
        from flykernels.launch import host

        config_ = chosen(p, self.device, config, threads)
        (code,) = eager_code.codes_for("topk", p, config_.key(), self.device.target, artefact)
        kernel = _kernels.get(code.digest) or _kernels.setdefault(code.digest, host.load(code))
        split = config_.parts * slot_bytes(config_) if config_.split else 0
        parts = config_.parts if config_.split else 0
        put(torch_door.OURS, kernel=kernel, threads=config_.threads, parts=parts, row_workspace=split)

    def _measure(self, case: Any, p: TopKProblem, put: Callable, threads: int):
        from flykernels import targets

        target = getattr(targets, self.device.target)
        dtype = next(t for t, name in NAMES.items() if name == p.dtype)
        x, dim = as_called(p, lambda n: drawn(0, (n,), dtype))
        candidates = []
        for c in configurations(p, target, threads).kept:

            def make(config=c.config):
                (code,) = eager_code.codes_for("topk", p, config.key(), target.name)
                artefact = eager_code.artefact_of((code,))
                use = lambda: self._use(p, config.key(), artefact, put, threads)
                return Candidate(_name(config), config.key(), artefact, use)

            make.name = _name(c.config)  # type: ignore[attr-defined]
            candidates.append(make)
        run = lambda: torch.topk(x, p.k, dim, p.largest, True)
        aten = lambda: put(torch_door.ATEN)
        aten()
        want = run()
        return eager_gate.contest(case, candidates, run, aten, lambda: check(run(), x, p.k, dim, p.largest, want))

    def forget(self) -> None:
        self.door.forget()


_kernels: dict[str, Any] = {}


class GpuTopK:
    """The operators on GPUs, below autograd. original, original_out: ATen's kernels as functions of (keys,
    *arguments)."""

    def __init__(self, device: Device, original: Callable, original_out: Callable):
        self.device, self.original, self.original_out = device, original, original_out
        self.plans: dict[tuple, Callable | None] = {}
        self.preferred: dict[tuple, tuple[TopKConfig, Any]] = {}  # cases decided by who calls this: kernels
        names = private.eager()
        self.empty, self.current_device = names.empty_strided_cuda, names.current_device

    # -- what the dispatcher calls
    def topk(self, keys: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        plan = self.plan(x, k, dim, largest)
        if plan is None:
            return self.original(keys, x, k, dim, largest, sorted)
        if x.get_device() != self.current_device():
            with torch.cuda.device(x.device):
                return plan(x, None, None)
        return plan(x, None, None)

    def topk_values(
        self, keys: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, values: Any,
        indices: Any,
    ) -> Any:  # fmt: skip
        plan = self.plan(x, k, dim, largest)
        if plan is None or not self._fit(x, k, dim, values, indices):
            return self.original_out(keys, x, k, dim, largest, sorted, values=values, indices=indices)
        with torch.cuda.device(x.device):
            return plan(x, values, indices)

    # -- plans
    def plan(self, x: Any, k: int, dim: int, largest: bool) -> Callable | None:
        key = self.key_of(x, k, dim, largest)
        found = self.plans.get(key, MISSING)
        return self._new_plan(key, x, k, dim, largest) if found is MISSING else found  # type: ignore[return-value]

    @staticmethod
    def key_of(x: Any, k: int, dim: int, largest: bool) -> tuple:
        """What a plan depends on."""
        return x.shape, x.stride(), x.dtype, k, dim, largest, x.data_ptr() & (WIDEST - 1), x.get_device()

    def planned(self, x: Any, k: int, dim: int, largest: bool, config: TopKConfig, codes: Any) -> dict:
        """What `plans` holds of a call that this kernel serves."""
        given = call_of(x, k, dim, largest)
        if isinstance(given, str):
            raise ValueError(given)
        p, strides, inner = given
        return {self.key_of(x, k, dim, largest): self.bind(p, config, codes, strides, inner, x, k, dim)}

    def _new_plan(self, key: tuple, x: Any, k: int, dim: int, largest: bool) -> Callable | None:
        if len(self.plans) >= PLANS_MOST:
            self.plans.clear()
        given = call_of(x, k, dim, largest)
        why = given if isinstance(given, str) else given[0].why_not(self.device)
        if why or isinstance(given, str):
            log.debug("top %s of %s: %s; ATen serves it", k, tuple(x.shape), why)
            self.plans[key] = None
            return None
        p, strides, inner = given
        try:
            case = eager_gate.key_for("topk", "topk", case_of(p), self.device)
            measure = lambda: self._measure(case, key, p, strides, inner, x, k, dim, largest)
            plan, for_good, decided = None, True, None
            if tuple(case_of(p).items()) in self.preferred:
                config, codes = self.preferred[tuple(case_of(p).items())]
                plan = self.bind(p, config, codes, strides, inner, x, k, dim)
            else:
                decided, for_good = eager_gate.decide(case, measure, not torch.cuda.is_current_stream_capturing())
            if decided is not None:
                config = chosen(p, self.device, eager_gate.won(decided), 1)
                codes = eager_code.codes_for("topk", p, config.key(), self.device.target, decided.artefact)
                plan = self.bind(p, config, codes, strides, inner, x, k, dim)
        except eager_gate.PinnedMiss:
            raise
        except Exception as e:
            log.warning("top %d of %s: no kernel (%s: %s); ATen serves it", k, tuple(x.shape), type(e).__name__, e)
            plan, for_good = None, True
        if for_good:
            self.plans[key] = plan
        return plan

    def prefer(self, p: TopKProblem, config: TopKConfig, codes: Any) -> None:
        """Calls of the problem's case that come here go to this kernel."""
        case = tuple(case_of(p).items())
        if self.preferred.get(case, (None, None))[0] != config:
            self.preferred[case] = config, codes
            self.plans.clear()

    def bind(self, p: TopKProblem, config: TopKConfig, codes: Any, strides: dict, inner: int, x: Any, k: int, dim: int):
        """plan(x, values or None, indices or None) -> (values, indices)."""
        launch, empty, kind = eager_code.launcher(codes), self.empty, x.dtype
        size = list(x.shape)
        size[dim] = k
        size, steps = tuple(size), _dense(size)  # type: ignore[assignment]
        numbers = scalar_values(p, config, strides, inner)
        number = torch.int64

        def run(x, values, indices):
            if values is None:
                values, indices = empty(size, steps, kind), empty(size, steps, number)
            launch(x.data_ptr(), values.data_ptr(), indices.data_ptr(), *numbers)
            return values, indices

        return run

    def _fit(self, x: Any, k: int, dim: int, values: Any, indices: Any) -> bool:
        """Whether results may be written where the caller wants them: dense, of the right type and size, apart."""
        size = list(x.shape)
        size[dim] = k
        for out, dtype in ((values, x.dtype), (indices, torch.int64)):
            if out.dtype != dtype or list(out.shape) != size or not out.is_contiguous() or out.device != x.device:
                return False
        spans = sorted(_span(t) for t in (x, values, indices))
        return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))

    def _measure(
        self, case: Any, key: tuple, p: TopKProblem, strides: dict, inner: int, x: Any, k: int, dim: int, largest: bool
    ):
        from flykernels import targets

        target = getattr(targets, self.device.target)
        candidates = []
        for c in configurations(p, target).kept:

            def make(config=c.config):
                codes = eager_code.codes_for("topk", p, config.key(), target.name)
                plan = self.bind(p, config, codes, strides, inner, x, k, dim)

                def use():
                    self.plans[key] = plan

                return Candidate(_name(config), config.key(), eager_code.artefact_of(codes), use)

            make.name = _name(c.config)  # type: ignore[attr-defined]
            candidates.append(make)

        def aten():
            self.plans[key] = None

        hard = torch.zeros_like(x) if k > HARD_FROM else None
        if hard is not None and (hard.stride() != x.stride() or x.data_ptr() % WIDEST != hard.data_ptr() % WIDEST):
            hard = None

        def run():
            if hard is not None:  # equal elements cost more where k is large: they count as much as the caller's
                torch.topk(hard, k, dim, largest, True)
            return torch.topk(x, k, dim, largest, True)

        aten()
        want = run()
        return eager_gate.contest(
            case, candidates, run, aten, lambda: check(run(), x, k, dim, largest, want), torch.cuda.synchronize
        )

    def forget(self) -> None:
        self.plans.clear()
        self.preferred.clear()


def call_of(x: Any, k: int, dim: int, largest: bool) -> tuple[TopKProblem, dict, int] | str:
    """(problem, strides as `scalar_values` wants them, inner) of a call, or why there is none."""
    rank = x.dim()
    if x.dtype not in NAMES:
        return f"dtype {x.dtype}: kernels take {', '.join(map(str, NAMES))}"
    if not rank or not -rank <= dim < rank or x.numel() == 0:
        return f"dimension {dim} of a tensor of shape {list(x.shape)}"
    dim %= rank
    width, size = x.shape[dim], x.element_size()
    outer, inner = _collapse(x, 0, dim), _collapse(x, dim + 1, rank)
    if outer is None or inner is None:
        return f"strides {x.stride()}: rows that lie one distance apart are needed"
    (n_outer, outer_stride), (n_inner, inner_stride) = outer, inner
    along = x.stride(dim) if width > 1 else 1
    rows = n_outer * n_inner
    if n_inner == 1 and along == 1:
        row = outer_stride if n_outer > 1 else width
        low = x.data_ptr() | row * size
        align = WIDEST if low % WIDEST == 0 and width * size >= WIDEST else size
        p = TopKProblem(rows, width, k, NAMES[x.dtype], largest, align=align)
        return p, {"x": (row,), "values": (k,), "indices": (k,)}, 1
    p = TopKProblem(rows, width, k, NAMES[x.dtype], largest, layout="any", align=size)
    out = (k * n_inner, n_inner, 1)
    return p, {"x": (outer_stride, along, inner_stride), "values": out, "indices": out}, n_inner


def _collapse(x: Any, first: int, end: int) -> tuple[int, int] | None:
    """(elements, stride) of these axes as one; None if they are not evenly spaced."""
    count, step, following = 1, 0, 0
    for axis in reversed(range(first, end)):
        size, stride = x.shape[axis], x.stride(axis)
        if size == 1:
            continue
        if count == 1:
            step = stride
        elif stride != following:
            return None
        count, following = count * size, stride * size
    return count, step


def _dense(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, n) for n in size[i + 1 :]) for i in range(len(size)))


def _span(x: Any) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _name(config: TopKConfig) -> str:
    shown = {k: v for k, v in config.key().items() if v not in (0, 1, False)}
    return "flykernels " + " ".join(f"{k}={v}" for k, v in shown.items())
