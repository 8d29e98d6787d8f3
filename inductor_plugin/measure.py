"""Measuring a candidate, in this process or in one of Inductor's tuning workers: right first, then fast.

A candidate is compared with ATen on the benchmark's inputs before its time counts. One that fails or is wrong is
quarantined in the cache, with the reason and the inputs' description, and gets the time `inf`.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from dataclasses import replace
from typing import Any

from flykernels.dtypes import dtype as element_type
from tuning_cache import FAILED, Key, Timing

from . import devices, kernels, private, settings
from .counters import counters
from .families import OWN

log = logging.getLogger(__name__)
names = private.load().names

# A candidate must beat the others by this much: a tie, or noise, leaves the user with what they had.
INERTIA = 0.02


# A part of the result is compared at a time, so that the comparison needs little memory: so many elements of C.
COMPARED_AT_ONCE = 1 << 25


class Wrong(Exception):
    """A candidate's result differs from ATen's by more than its types and K explain."""


class NoMemory(Exception):
    """The device had no room for the tensors of a measurement: it says nothing of the candidate."""


def check(spec: kernels.Spec, inputs: list[Any], out: Any, beyond: tuple[float, float] = (0.0, 0.0)) -> None:
    """Compare `out` with ATen's result on the same inputs, computed in f32 on the CPU and in f64 on a GPU, where f32
    products may be rounded to TF32. Raises Wrong.

    Bound for element (i, j), eps being half a unit in the last place: 2 K eps_f32 |a_i| |b_j|, since either sum of K
    products in f32, in whatever order, errs by at most K eps_f32 sum |a_ik b_kj| (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 3.1) and the sum is bounded by the norms (Cauchy-Schwarz); that again for the
    bias and activation (whose slopes are below 1.13); then one rounding to the output type each, 2 eps_out |c|.

    beyond: what sums with fewer bits than f32 may add, times |a_i| |b_j| and times |c|."""
    operands = list(inputs)
    if spec.problem.packed_b:
        operands[1] = kernels.unpacked_b(spec, operands[1])
    a, b, *rest = operands
    rows = max(1, COMPARED_AT_ONCE * out.shape[-2] // max(1, out.numel()))
    for first in range(0, out.shape[-2], rows):
        part = lambda x: x.narrow(-2, first, min(rows, out.shape[-2] - first))
        pieces = [part(x) if x.dim() > 1 and x.shape[-2] == out.shape[-2] else x for x in rest]
        _compare(spec, [part(a), b, *pieces], part(out), first * out.shape[-1], beyond)


def _compare(spec: kernels.Spec, operands: list[Any], out: Any, start: int, beyond: tuple[float, float]) -> None:
    """`check` of a part of the rows; start: elements of (the first matrix of) C before it."""
    import torch

    exact = torch.float32 if out.device.type == "cpu" else torch.float64
    a, b, *rest = (x.to(exact) for x in operands)
    expected = torch.empty(out.shape, dtype=exact, device=out.device)
    plain = replace(spec, problem=replace(spec.problem, packed_b=False))
    kernels.aten(plain)(a, b, *rest, out=expected)
    f32, result = element_type("f32"), element_type(spec.problem.out_dtype)
    norms = a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)
    added = sum((x.abs() for x in rest), torch.zeros((), device=out.device, dtype=exact))
    slack = 8 * f32.epsilon * (expected.abs() + added) + torch.finfo(out.dtype).tiny
    of_norms, of_result = 1.13 * 2 * spec.problem.k * f32.epsilon + beyond[0], 2 * result.epsilon + beyond[1]
    bound = of_norms * norms + of_result * expected.abs() + slack
    error = (out.to(exact) - expected).abs()
    bad = ~(error <= bound)  # NaN is bad
    if bool(bad.any()):
        at = int(bad.flatten().nonzero()[0])
        value = lambda x: x.flatten()[at].item()
        raise Wrong(
            f"{int(bad.sum())} of {out.numel()} results differ from ATen's; first at {start + at}: {value(out):.6g} "
            f"for {value(expected):.6g}, bound {value(bound):.3g}"
        )


def sane(spec: kernels.Spec, tensors: Any, variant: int = 0) -> Any:
    """Inputs of a benchmark with numbers that the operation takes; variant: of which kind."""
    return OWN[spec.op].sane(spec.problem, tensors, variant) if spec.op in OWN else tensors


def variants(spec: kernels.Spec) -> int:
    """How many kinds of inputs a measurement is the mean of."""
    return OWN[spec.op].variants(spec.problem) if spec.op in OWN else 1


class _Request(names.BenchmarkRequest):  # type: ignore[name-defined,misc]
    """One candidate's measurement. Picklable: it holds descriptions, no tensors.

    spec, key  what is measured, and where that is recorded"""

    def __init__(self, spec: kernels.Spec, key: Key, inputs: list[Any], output: Any):
        super().__init__(kernel_name=spec.name, input_tensor_meta=inputs, output_tensor_meta=output, extra_args=())
        self.spec, self.key = spec, key

    def benchmark(self, *tensors: Any, out: Any = None) -> float:
        """Median time of a call in milliseconds, with INERTIA added; inf if it failed or was wrong. Never raises."""
        store = settings.store()
        try:
            known = store.timed(self.key, self.spec.name, lambda: self._measured(*tensors, out=out))
            if known.microseconds is None:
                return math.inf
            return known.microseconds / 1e3 * (1 + INERTIA)
        except Exception as e:
            log.warning("%s: not measured: %s: %s", self.spec.name, type(e).__name__, e)
            return math.inf

    def calls(self, count: int) -> list[Any]:
        """Functions without arguments that run the candidate, each on tensors made for it."""
        kernel = kernels.callable_for(self.spec)
        made = lambda i: sane(self.spec, [m.to_tensor() for m in self.input_tensor_meta], i)
        return [functools.partial(kernel, *made(i), out=self.output_tensor_meta.to_tensor()) for i in range(count)]

    @property
    def bytes(self) -> int:
        """Of a call's tensors, if they are dense."""
        metas = [*self.input_tensor_meta, self.output_tensor_meta]
        return sum(math.prod(m.sizes) * m.dtype.itemsize for m in metas)

    def _measured(self, *tensors: Any, out: Any) -> Timing:
        """_measure; where memory runs out once more after torch has given back what it keeps, without a time."""
        try:
            return self._measure(*tensors, out=out)
        except NoMemory:
            devices.free_memory()
        try:
            return self._measure(*tensors, out=out)
        except NoMemory as e:
            log.warning("%s %s: not measured, the device has no memory left: %s", self.spec.op, self.spec.name, e)
            return Timing(self.spec.name, None, self.spec.config)

    def _measure(self, *tensors: Any, out: Any) -> Timing:
        try:
            if out is None:
                tensors, out = tuple(m.to_tensor() for m in self.input_tensor_meta), self.output_tensor_meta.to_tensor()
            code = kernels.code_for(self.spec)
            artefact = settings.store().add(code)
            kernel = kernels.callable_for(self.spec)
            own, times = OWN.get(self.spec.op), []
            beyond = own.errors(self.spec) if own else (0.0, 0.0)
            for variant in range(variants(self.spec)):
                given = tuple(sane(self.spec, tensors, variant))
                out.fill_(math.nan)
                kernel(*given, out=out)
                parts = own.products(self.spec.problem, given, out) if own else [(self.spec, list(given), out)]
                for dense, operands, result in parts:
                    check(dense, operands, result, beyond)
                times.append(self.do_bench(lambda given=given: kernel(*given, out=out), *given, out=out))
            counters["benchmarks"] += 1
            milliseconds = statistics.mean(times)
            return Timing(self.spec.name, round(milliseconds * 1e3, 3), self.spec.config, artefact)
        except Exception as e:
            if devices.out_of_memory(e):
                raise NoMemory(str(e)) from None  # without its traceback, whose frames hold tensors
            reason = f"{type(e).__name__}: {e}"
            log.warning("%s %s: quarantined: %s", self.spec.op, self.spec.name, reason)
            inputs = ", ".join(f"{m.dtype} {list(m.sizes)}:{list(m.strides)}" for m in self.input_tensor_meta)
            return Timing(self.spec.name, FAILED, self.spec.config, None, f"{reason} (inputs {inputs})")


class CpuRequest(names.CPUDeviceBenchmarkMixin, _Request):  # type: ignore[name-defined,misc]
    """On the CPU, timed as Inductor times its C++ templates."""


class GpuRequest(names.GPUDeviceBenchmarkMixin, _Request):  # type: ignore[name-defined,misc]
    """On a GPU; see gpu_timing."""

    def do_bench(self, fn: Any, *_: Any, **__: Any) -> float:
        from . import gpu_timing

        return gpu_timing.alone(fn)

    def _measure(self, *tensors: Any, out: Any) -> Timing:
        import torch

        with torch.cuda.device(self.output_tensor_meta.device):  # launches go to the current device
            return super()._measure(*tensors, out=out)


def request(spec: kernels.Spec, key: Key, inputs: list[Any], output: Any) -> _Request:
    """The measurement for the device the output lies on."""
    return (CpuRequest if output.device.type == "cpu" else GpuRequest)(spec, key, inputs, output)
