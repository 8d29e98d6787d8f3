"""The door for RMSNorm's gradients on GPUs, with the CPU in the place of one: what the driver would be given, what is
ATen's, and what goes on to Python."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flykernels.launch import torch_door
from flykernels.targets import sm90a
from inductor_plugin import eager_rms_door
from inductor_plugin.devices import DEVICES
from inductor_plugin.eager_rms import RMSNorm
from inductor_plugin.eager_rms_call import composed_backward
from templates.rms_norm.build import build as build_kernel
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

from .driver import FUNCTION, STREAM, memory
from .test_rms_door import NUMBERS, PARTS, TILE, WORKGROUP, NormDriver

SECOND, THIRD = (0x2345, 128, 7), (0x3456, 64, 5)
PART_BYTES = 4 * 8


class BackDriver(NormDriver):
    """Launches of three kernels: the first leaves dx, the last dweight; what the second is given is looked at."""

    after, part_bytes = (SECOND, THIRD), PART_BYTES

    def resolve(self, width, rows, code, exact):
        self.asked.append((width, rows, code & 0xFFFFFFFF, exact))
        if self.state == torch_door.ATEN:
            self.door.put(width, rows, code, self.state)
        else:
            self.door.put(
                width, rows, code, self.state, function=FUNCTION, workgroup=WORKGROUP, tile=TILE, parts_most=PARTS,
                after=self.after, part_bytes=self.part_bytes,
            )  # fmt: skip
        return None

    def compute(self, at, function, grid):
        width, _, code, _ = self.asked[-1]
        weighted = (code >> torch_door.WEIGHT_SHIFT & 0xFF) != torch_door.NO_WEIGHT
        gradient = bool(code >> torch_door.WEIGHT_GRADIENT_BIT & 1)
        values = [ctypes.c_int64.from_address(at[i]).value for i in range(8 + weighted + gradient + gradient)]
        x, *rest = values
        w = rest.pop(0) if weighted else 0
        rstd, dy, dx, *rest = rest
        dweight = rest.pop(0) if gradient else 0
        rows, stride, dy_stride, parts = rest[:4]
        assert parts == min(-(-rows // TILE), PARTS)
        kind = NUMBERS[code & 0xFF]
        lines = lambda address, step: memory(address, (rows - 1) * step + width, kind).as_strided(
            (rows, width), (step, 1)
        )
        weight = memory(w, width, NUMBERS[code >> torch_door.WEIGHT_SHIFT & 0xFF]) if w else None
        got = composed_backward(
            lines(dy, dy_stride), lines(x, stride), [width], memory(rstd, rows, torch.float32)[:, None], weight,
            (True, gradient),
        )  # fmt: skip
        if function == FUNCTION:
            memory(dx, rows * width, kind).view(rows, width).copy_(got[0])
        if gradient:
            memory(rest[4], parts * PART_BYTES, torch.uint8).fill_(7)  # workspace is there
        if function == (self.after[-1] if self.after else (FUNCTION,))[0] and gradient:
            memory(dweight, width, weight.dtype).copy_(got[1])
        return values


@pytest.fixture
def driver():
    RMSNorm(DEVICES["cpu"], None, None).serve_doors()
    made = BackDriver()
    made.door.open()
    yield made
    made.door.close()


def operands(dtype=torch.float32, weight=torch.float32, rows=9, pad=0):
    x, dy = (torch.randn(rows, 8 + pad).to(dtype)[:, :8] for _ in range(2))
    rstd = (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return dy, x, [8], rstd, None if weight is None else torch.randn(8).to(weight)


def call(*arguments):
    with torch.inference_mode():
        return torch.ops.aten._fused_rms_norm_backward(*arguments)


SERVED = {
    "rows": ({}, [True, True]),
    "strides": ({"pad": 4}, [True, True]),
    "bf16, weight f32": ({"dtype": torch.bfloat16}, [True, True]),
    "without its gradient": ({}, [True, False]),
    "no weight": ({"weight": None}, [True, True]),
    "the weight's alone": ({"rows": 2}, [False, True]),
    "one row": ({"rows": 1}, [True, True]),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(driver, name):
    how, mask = SERVED[name]
    arguments = operands(**how)
    want = composed_backward(*arguments, mask)
    gradient = mask[1] and arguments[-1] is not None
    driver.after, driver.part_bytes = ((SECOND, THIRD), PART_BYTES) if gradient else ((), 0)
    for _ in (1, 2):
        driver.launches.clear()
        got = call(*arguments, mask)
        assert len(driver.asked) == 1
        for a, b in zip(got, want):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.is_contiguous() and a.shape == b.shape
                torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    parts = min(-(-arguments[1].shape[0] // TILE), PARTS)
    grids = [grid for _, grid, *_ in driver.launches]
    assert grids == [(parts, 1, 1), *([(SECOND[2], parts, 1), (THIRD[2], 1, 1)] if gradient else [])]
    assert [w for w, *_ in driver.launches] == [
        (f, STREAM) for f in ((FUNCTION, SECOND[0], THIRD[0]) if gradient else (FUNCTION,))
    ]
    assert [b for _, _, b, *_ in driver.launches][1:] == ([(SECOND[1], 1, 1), (THIRD[1], 1, 1)] if gradient else [])


def test_two_launches(driver):
    driver.after = (SECOND,)
    arguments = operands()
    torch.testing.assert_close(call(*arguments, [True, True]), composed_backward(*arguments, (True, True)))
    assert [grid for _, grid, *_ in driver.launches] == [(3, 1, 1), (SECOND[2], 1, 1)]


PYTHONS = {
    "expanded": lambda dy, x, shape, rstd, w: (dy[:1].expand(9, 8), x, shape, rstd, w),
    "transposed": lambda dy, x, shape, rstd, w: (dy.t().contiguous().t(), x, shape, rstd, w),
    "a float64 rstd": lambda dy, x, shape, rstd, w: (dy, x, shape, rstd.double(), w),
    "dy of another type": lambda dy, x, shape, rstd, w: (dy.bfloat16(), x, shape, rstd, w),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_what_goes_on_to_python(driver, name):
    arguments = PYTHONS[name](*operands())
    for a, b in zip(call(*arguments, [True, True]), composed_backward(*arguments, (True, True))):
        torch.testing.assert_close(a, b)
    assert not driver.launches


def test_what_the_driver_refuses_is_pythons(driver):
    driver.status = 701
    arguments = operands()
    torch.testing.assert_close(call(*arguments, [True, True]), composed_backward(*arguments, (True, True)))


@pytest.mark.parametrize("rows, width", [(64, 1024), (1024, 4096), (64, 40000)])
@pytest.mark.parametrize("gradient", [True, False])
def test_every_configuration_can_be_launched(rows, width, gradient):
    p = RMSNormProblem(width, "bf16", "bf16", "backward", weight_gradient=gradient, align=16, rows_hint=rows)
    for c in configurations(p, sm90a).kept[:3]:
        assert eager_rms_door.unsuited(build_kernel(p, c.config, sm90a), c.config.key(), p) is None
