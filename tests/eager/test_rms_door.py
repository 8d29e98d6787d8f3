"""The door for RMSNorm on GPUs, with the CPU in the place of one: a driver and a stream of our own, ATen's
composition as the function it falls back to. Every argument that a driver would be given is looked at."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from flykernels.launch import torch_door
from flykernels.launch.torch_library import RmsNormDoor, address_of, libtorch
from flykernels.targets import gfx950
from flykernels.targets.x86_rms_door import build
from inductor_plugin import eager_rms_door
from templates.rms_norm.build import build as build_kernel
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

from .driver import CPU, FUNCTION, GUARD, STREAM, Driver, memory

WORKGROUP, TILE, PARTS = 256, 4, 3
NUMBERS = {torch_door.F32: torch.float32, torch_door.BF16: torch.bfloat16, torch_door.F16: torch.float16}


class NormDriver(Driver):
    """Launches of a forward kernel."""

    def make_door(self, launch, stream, guards):
        composed = address_of(getattr(libtorch(), torch_door.COMPOSED))
        return RmsNormDoor(build(CPU), self.resolve, "CPU", launch, stream, composed, 0, guards)

    def resolve(self, width, rows, code, exact):
        self.asked.append((width, rows, code & 0xFFFFFFFF, exact))
        if self.state == "error":
            return "pinned-strict: not known"
        named = {"function": FUNCTION, "workgroup": WORKGROUP, "tile": TILE, "parts_most": PARTS}
        self.door.put(width, rows, code, self.state, **(named if self.state == torch_door.OURS else {}))
        return None

    def compute(self, at, function, grid):
        width, _, code, _ = self.asked[-1]
        weighted = (code >> torch_door.WEIGHT_SHIFT & 0xFF) != torch_door.NO_WEIGHT
        values = [ctypes.c_int64.from_address(at[i]).value for i in range(7 + weighted)]
        x, *rest = values
        w = rest.pop(0) if weighted else 0
        y, rstd, eps, rows, stride, parts = rest
        dtype = NUMBERS[code & 0xFF]
        given = memory(x, (rows - 1) * stride + width, dtype).as_strided((rows, width), (stride, 1)).float()
        scale = (given.pow(2).mean(-1) + ctypes.c_float.from_buffer(ctypes.c_int32(eps & 0xFFFFFFFF)).value).rsqrt()
        out = given * scale[:, None]
        if w:
            out = out * memory(w, width, NUMBERS[code >> torch_door.WEIGHT_SHIFT & 0xFF]).float()
        memory(y, rows * width, dtype).view(rows, width).copy_(out)
        memory(rstd, rows, torch.float32).copy_(scale)
        assert parts == grid == min(-(-rows // TILE), PARTS)
        return values


@pytest.fixture
def driver():
    made = NormDriver()
    made.door.open()
    yield made
    made.door.close()


def call(x, shape, weight=None, eps=None):
    with torch.inference_mode():
        try:
            return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        except Exception as e:
            return type(e), str(e)


def aten(driver, *arguments):
    driver.door.close()
    try:
        return call(*arguments)
    finally:
        driver.door.open()


SERVED = {
    "rows": lambda: (torch.randn(5, 8), [8], torch.randn(8), 1e-5),
    "no weight": lambda: (torch.randn(5, 8), [8], None, None),
    "one row": lambda: (torch.randn(8), [8], torch.randn(8), 1e-3),
    "many rows": lambda: (torch.randn(100, 8), [8], torch.randn(8), 1e-3),
    "row stride": lambda: (torch.randn(2, 5, 12)[:, :, :8], [8], None, 1e-3),
    "two axes": lambda: (torch.randn(3, 2, 5, 4), [5, 4], torch.randn(5, 4), None),
    "bf16": lambda: (torch.randn(4, 8).bfloat16(), [8], torch.randn(8).bfloat16(), 1e-6),
    "f16, weight f32": lambda: (torch.randn(4, 8).half(), [8], torch.randn(8), 1e-6),
    "axes of one": lambda: (torch.randn(1, 4, 1, 8), [1, 8], torch.randn(1, 8), 1e-6),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_served(driver, name):
    arguments = SERVED[name]()
    want = aten(driver, *arguments)
    for turn in range(2):
        got = call(*arguments)
        assert len(driver.launches) == turn + 1 and len(driver.asked) == 1
        for a, b in zip(got, want):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype != torch.float32 else 1e-5, atol=1e-5)
    x, shape, weight, _ = arguments
    rows = x.numel() // torch.Size(shape).numel()
    where, grid, block, shared, extra, values = driver.launches[-1]
    assert where == (FUNCTION, STREAM) and grid == (min(-(-rows // TILE), PARTS), 1, 1)
    assert block == (WORKGROUP, 1, 1) and shared == 0 and extra is None
    assert values[0] == x.data_ptr() and (weight is None or values[1] == weight.data_ptr())
    width, bucket, code, exact = driver.asked[0]
    assert (width, exact) == (torch.Size(shape).numel(), rows) and 1 << bucket >= rows > (1 << bucket) // 2
    numbers = {dtype: n for n, dtype in NUMBERS.items()}
    low = x.data_ptr() | (0 if weight is None else weight.data_ptr()) | 16
    if rows > 1:
        low |= x.stride(-len(shape) - 1) * x.element_size() if x.size(-len(shape) - 1) > 1 else 0
    kinds = numbers[x.dtype], torch_door.NO_WEIGHT if weight is None else numbers[weight.dtype]
    assert code == torch_door.rms_code_of(*kinds, low & -low, 0)


ATENS = {
    "float64": lambda: (torch.randn(4, 8).double(), [8]),
    "another shape": lambda: (torch.randn(4, 8), [7]),
    "a longer shape": lambda: (torch.randn(8), [4, 8]),
    "no shape": lambda: (torch.randn(4, 8), []),
    "a short weight": lambda: (torch.randn(4, 8), [8], torch.randn(7)),
    "a strided weight": lambda: (torch.randn(4, 8), [8], torch.randn(16)[::2]),
    "a weight of float64": lambda: (torch.randn(4, 8), [8], torch.randn(8).double()),
    "no rows": lambda: (torch.randn(0, 8), [8]),
    "no columns": lambda: (torch.randn(4, 0), [0]),
    "transposed": lambda: (torch.randn(8, 4).t(), [8], torch.randn(8)),
    "expanded": lambda: (torch.randn(8).expand(4, 8), [8]),
    "strided columns": lambda: (torch.randn(4, 16)[:, ::2], [8]),
    "uneven rows": lambda: (torch.randn(5, 6, 8)[:, :4], [8]),
    "a number": lambda: (torch.tensor(3.0), []),
    "17 axes": lambda: (torch.randn([1] * 15 + [2, 8]), [8]),
}


@pytest.mark.parametrize("name", ATENS)
def test_what_is_atens(driver, name):
    arguments = ATENS[name]()
    got, want = call(*arguments), aten(driver, *arguments)
    assert not driver.launches
    if isinstance(want[0], type):
        assert got == want
        return
    for a, b in zip(got, want):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_where_the_table_says_aten(driver):
    driver.state = torch_door.ATEN
    x = torch.randn(4, 8)
    assert torch.equal(call(x, [8])[0], aten(driver, x, [8])[0])
    assert not driver.launches and len(driver.asked) == 1
    driver.state = "error"
    assert call(torch.randn(4, 9), [9]) == (RuntimeError, "pinned-strict: not known")


def test_what_the_driver_refuses_is_atens(driver):
    x = torch.randn(4, 8)
    driver.status = 701
    assert torch.equal(call(x, [8])[0], aten(driver, x, [8])[0]) and not driver.launches


def test_on_a_device_that_is_not_the_current_one(driver):
    driver.current = 3
    x = torch.randn(4, 8)
    torch.testing.assert_close(call(x, [8])[0], aten(driver, x, [8])[0])
    assert len(driver.launches) == 1 and driver.guards == [-1, GUARD]


def test_nothing_is_kept(driver):
    """Neither after a result of ours, nor after ATen's, nor after an error."""
    for shape, dtype in (([9], torch.float32), ([9], torch.float64), ([7], torch.float32)):
        freed = []
        memory = (ctypes.c_char * (18 * dtype.itemsize))()
        x = torch.frombuffer(memory, dtype=dtype).view(2, 9)
        weak = weakref.finalize(memory, freed.append, True)
        result = call(x, shape, torch.ones(shape, dtype=dtype) if shape == [9] else None, 1e-5)
        del x, memory, result
        gc.collect()
        assert freed and not weak.alive, (shape, dtype)


@pytest.mark.parametrize("rows, width", [(1, 1024), (64, 4096), (8192, 4096)])
def test_configurations_that_the_door_can_launch(rows, width):
    """Whatever it takes for suited is one object whose grid is the argument `parts`; the rest is named."""
    p = RMSNormProblem(width, "bf16", "bf16", rstd=True, rows_hint=rows)
    kept = configurations(p, gfx950).kept
    reasons = []
    for c in kept[:4]:
        config = c.config.key()
        reasons.append(eager_rms_door.unsuited(build_kernel(p, c.config, gfx950), config, p))
    assert None in reasons
