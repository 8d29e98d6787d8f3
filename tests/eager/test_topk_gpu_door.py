"""The door for top-k on GPUs, with the CPU in the place of one: a driver and a stream of our own, ATen's function for
the CPU as the one it falls back to. Every argument that a driver would be given is looked at."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from flykernels.launch import torch_door
from flykernels.launch.torch_library import GpuTopkDoor, address_of, libtorch
from flykernels.targets import gfx950
from flykernels.targets.x86_topk_door import build_gpu
from inductor_plugin import eager_topk_door
from templates.topk.arguments import scalars
from templates.topk.build import build
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

from .driver import CPU, FUNCTION, GUARD, STREAM, Driver

WORKGROUP, ROWS, SHARED = 256, 4, 4096
NUMBERS = {torch_door.F32: torch.float32, torch_door.BF16: torch.bfloat16, torch_door.F16: torch.float16}


class TopkDriver(Driver):
    """Launches of a top-k kernel, whose every argument is noted by name. python: slots name no kernel."""

    python = False

    def make_door(self, launch, stream, guards):
        own = [address_of(getattr(libtorch(), name)) for name in (torch_door.TOPK, torch_door.TOPK_OUT)]
        return GpuTopkDoor(build_gpu(CPU), self.resolve, "CPU", launch, stream, *own, guards)

    def resolve(self, width, k, code, rows):
        self.asked.append((width, k, code, rows))
        if self.state == "error":
            return "pinned-strict: not known"
        named = {"function": FUNCTION, "workgroup": WORKGROUP, "rows": ROWS, "shared": SHARED}
        self.door.put(width, k, code, self.state, **({} if self.python or self.state == torch_door.ATEN else named))
        return None

    def compute(self, at, function, grid):
        code = self.asked[-1][2]
        dtype, apart = NUMBERS[code & 0xFF], bool(code >> torch_door.ANY_BIT & 1)
        p = TopKProblem(1, 1, 1, layout="any" if apart else "last")
        names = ("x", "values", "indices", *scalars(p, TopKConfig("rows", 16)))
        narrow = {"rows", "width", "k", "inner"}  # i32
        read = lambda i, kind: kind.from_address(at[i]).value
        got = {n: read(i, ctypes.c_int32 if n in narrow else ctypes.c_int64) for i, n in enumerate(names)}
        inner, rows = got.get("inner", 1), got["rows"]

        def tensor(name, size, kind):
            if apart:
                strides = tuple(got[f"{name}_{axis}"] for axis in ("outer", "along", "inner"))
            else:
                strides = (got[f"{name}_row"], 1, 0)
            shape = (rows // inner, size, inner)
            last = sum((n - 1) * s for n, s in zip(shape, strides))
            memory = (ctypes.c_char * ((last + 1) * kind.itemsize)).from_address(got[name])
            return torch.frombuffer(memory, dtype=kind).as_strided(shape, strides)

        x = tensor("x", got["width"], dtype)
        largest = bool(code >> torch_door.LARGEST_BIT & 1)
        order = torch.sort(x, dim=1, descending=largest, stable=True).indices[:, : got["k"]]
        tensor("values", got["k"], dtype).copy_(x.gather(1, order))
        tensor("indices", got["k"], torch.int64).copy_(order)
        assert grid == -(-rows // ROWS)
        return got


@pytest.fixture
def driver():
    made = TopkDriver()
    made.door.open()
    yield made
    made.door.close()


def call(x, *how, out=None):
    with torch.inference_mode():
        try:
            return torch.topk(x, *how, out=out) if out is not None else torch.topk(x, *how)
        except Exception as e:
            return type(e), str(e)


def aten(driver, *arguments):
    driver.door.close()
    try:
        return call(*arguments)
    finally:
        driver.door.open()


def same(got, want):
    if isinstance(want, tuple) and isinstance(want[0], type):
        assert got == want
        return
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and torch.equal(a, b)


draw = lambda *shape: torch.randperm(torch.Size(shape).numel()).float().view(shape)
SERVED = {
    "rows": lambda: (draw(5, 80), 3),
    "one row": lambda: (draw(80), 80),
    "the smallest": lambda: (draw(9, 80), 3, -1, False),
    "in any order": lambda: (draw(9, 80), 3, 1, True, False),
    "a row stride": lambda: (draw(5, 12)[:, :8], 3),
    "another dimension": lambda: (draw(6, 40, 3), 4, 1),
    "the first dimension": lambda: (draw(40, 6), 4, 0),
    "bf16": lambda: (torch.arange(64.0)[torch.randperm(64)].view(2, 32).bfloat16(), 4),
    "f16": lambda: (torch.arange(64.0)[torch.randperm(64)].view(2, 32).half(), 4),
    "a row of one": lambda: (draw(4, 1), 1),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(driver, name):
    x, k, *how = SERVED[name]()
    want = aten(driver, x, k, *how[:2])  # ours are in order whether asked for or not
    for turn in range(2):
        same(call(x, k, *how), want)
        assert len(driver.launches) == turn + 1 and len(driver.asked) == 1
    out = torch.empty_like(want[0]), torch.empty_like(want[1])
    assert call(x, k, *how, out=out)[0] is out[0] and len(driver.launches) == 3 and len(driver.asked) == 1
    same(out, want)
    dim, largest = how[0] if how else -1, how[1] if len(how) > 1 else True
    where, grid, block, shared, extra, got = driver.launches[-1]
    assert where == (FUNCTION, STREAM) and block == (WORKGROUP, 1, 1) and grid[1:] == (1, 1)
    assert shared == SHARED and extra is None
    assert got["x"] == x.data_ptr() and got["values"] == out[0].data_ptr() and got["indices"] == out[1].data_ptr()
    width, asked_k, code, rows = driver.asked[0]
    assert (width, asked_k, rows) == (x.shape[dim], k, x.numel() // x.shape[dim])
    assert bool(code >> torch_door.LARGEST_BIT & 1) == largest and code >> torch_door.THREADS_SHIFT == -1


ATENS = {
    "float64": lambda: (draw(4, 8).double(), 2),
    "integers": lambda: (draw(4, 8).long(), 2),
    "k = 0": lambda: (draw(4, 8), 0),
    "k > N": lambda: (draw(4, 8), 9),
    "k < 0": lambda: (draw(4, 8), -1),
    "dim": lambda: (draw(4, 8), 2, 2),
    "no rows": lambda: (torch.randn(0, 8), 2),
    "a number": lambda: (torch.tensor(3.0), 1),
    "uneven rows": lambda: (draw(5, 6, 8)[:, :4], 2),
    "17 axes": lambda: (torch.randperm(16).float().view([1] * 15 + [2, 8]), 2),
}


@pytest.mark.parametrize("name", ATENS)
def test_what_is_atens(driver, name):
    arguments = ATENS[name]()
    same(call(*arguments), aten(driver, *arguments))
    assert not driver.launches and not driver.asked


OUTS = {
    "empty": lambda: (torch.empty(0), torch.empty(0).long()),
    "strided": lambda: (torch.empty(3, 4)[:, ::2], torch.empty(2, 3).long().t()),
    "of another float": lambda: (torch.empty(3, 2).double(), torch.empty(3, 2).long()),
    "of other integers": lambda: (torch.empty(3, 2), torch.empty(3, 2).int()),
    "on meta": lambda: (torch.empty(3, 2, device="meta"), torch.empty(3, 2).long()),
    "shared": lambda: (lambda b: (b[:6].view(3, 2), b.view(torch.int64)[:6].view(3, 2)))(torch.zeros(64)),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_that_are_atens(driver, name):
    x = draw(3, 50)
    got = call(x, 2, out=OUTS[name]())
    assert not driver.launches
    driver.door.close()
    want = call(x, 2, out=OUTS[name]())
    driver.door.open()
    same(got, want)


def test_results_over_the_input_are_atens(driver):
    x = draw(3, 50)
    call(x, 2, out=(x[:, :2], torch.empty(3, 2).long()))
    call(x.flatten(), 6, out=(x.flatten()[:6], torch.empty(6).long()))
    assert not driver.launches


def test_what_the_driver_refuses_is_atens(driver):
    x = draw(5, 80)
    driver.status = 700
    same(call(x, 3), aten(driver, x, 3))
    out = torch.empty(5, 3), torch.empty(5, 3).long()
    call(x, 3, out=out)
    same(out, aten(driver, x, 3))
    assert driver.asked and not driver.launches


def test_atens_slots_and_messages(driver):
    x = draw(5, 80)
    driver.state = torch_door.ATEN
    same(call(x, 3), aten(driver, x, 3))
    assert len(driver.asked) == 1 and not driver.launches
    driver.state = "error"
    assert call(x, 4) == (RuntimeError, "pinned-strict: not known")
    with pytest.raises(RuntimeError, match="not known"):
        torch.topk(x, 4, out=(torch.empty(5, 4), torch.empty(5, 4).long()))


def test_short_rows_are_not_read_in_vectors(driver):
    """Though they begin at multiples of a vector's size: the last one ends before its vector does."""
    for width, misaligned in ((3, True), (4, False)):
        x = draw(5, 4)[:, :width]
        same(call(x, 2), aten(driver, x, 2))
        assert bool(driver.asked[-1][2] >> torch_door.MISALIGNED_BIT & 1) == misaligned


def test_another_device_is_made_current(driver):
    driver.current = 0
    call(draw(5, 80), 3)
    assert driver.guards == [-1, GUARD]
    assert len(driver.launches) == 1


class Python:
    """In the place of GpuTopK: writes down calls, and has ATen serve them."""

    def __init__(self):
        self.calls = []

    def topk(self, keys, x, k, dim, largest, sorted):
        self.calls.append((k, dim, largest, sorted))
        order = torch.sort(x, dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, k).contiguous()
        return x.gather(dim, order), order

    def topk_values(self, keys, x, k, dim, largest, sorted, *, values, indices):
        found = self.topk(keys, x, k, dim, largest, sorted)
        return values.copy_(found[0]), indices.copy_(found[1])


def test_python_launches_what_needs_workspace(driver):
    driver.python, python = True, Python()
    eager_topk_door.serve(python, "CPU")
    x = draw(5, 80)
    same(call(x, 3, -1, False, True), aten(driver, x, 3, -1, False))
    out = torch.empty(5, 3), torch.empty(5, 3).long()
    got = call(x, 3, out=out)
    same(out, aten(driver, x, 3))
    assert got[0] is out[0] and got[1] is out[1]
    assert python.calls == [(3, -1, False, True), (3, -1, True, True)] and not driver.launches


def test_gradients(driver):
    x = draw(5, 80).requires_grad_()
    (dx,) = torch.autograd.grad(torch.topk(x, 3).values.sum(), x)
    assert len(driver.launches) == 1 and dx.sum() == 15


def test_nothing_is_kept(driver):
    """Neither after a result of ours, nor after ATen's, nor after an error: operands and given results are free."""
    for k, dtype in ((3, torch.float32), (3, torch.float64), (19, torch.float32)):
        for given in (False, True):
            freed, memory, views = [], [], []
            for size, kind in ((18, dtype), (2 * k, dtype), (2 * k, torch.int64)):
                memory.append((ctypes.c_char * (size * kind.itemsize))())
                views.append(torch.frombuffer(memory[-1], dtype=kind).view(2, -1))
            weak = [weakref.finalize(m, freed.append, True) for m in memory]
            result = call(views[0], k, out=tuple(views[1:])) if given else call(views[0], k)
            del memory, views, result
            gc.collect()
            assert len(freed) == 3 and not any(w.alive for w in weak), (k, dtype, given)


@pytest.mark.parametrize(
    "rows, width, k", [(1, 128, 6), (300, 8192, 8), (4096, 256, 8), (16, 32000, 300), (1, 10**6, 50)]
)
def test_which_kernels_the_door_launches(rows, width, k):
    """One workgroup for so many rows, whatever their number; what is split is Python's."""
    p = TopKProblem(rows, width, k)
    config = configurations(p, gfx950).kept[0].config
    found = eager_topk_door.rows_together([build(p, config, gfx950)], config, p)
    lanes = config.lanes if config.family in ("rows", "rounds") else config.workgroup_size
    assert found == (None if config.split else config.workgroup_size // lanes)


@pytest.mark.parametrize("p", [
    TopKProblem(1, 128, 6), TopKProblem(5, 128, 6), TopKProblem(5, 127, 6), TopKProblem(1, 127, 6, align=4),
    TopKProblem(5, 127, 6, "f16", False, align=2), TopKProblem(1, 40, 3, layout="any", align=4),
    TopKProblem(6, 40, 3, layout="any", align=4),
])  # fmt: skip
def test_what_is_measured_is_what_is_called(driver, p):
    """A case is measured by calls that look up the very slot that it is decided for."""
    kind = {"f32": torch.float32, "f16": torch.float16}[p.dtype]
    x, dim = eager_topk_door.as_called(p, lambda n: torch.zeros(n, dtype=kind))
    assert x.shape[dim] == p.width and x.numel() == p.width * p.rows
    torch.topk(x, p.k, dim, p.largest)
    (width, k, code, rows), largest = driver.asked[0], torch_door.LARGEST_BIT
    assert (width, k, rows, bool(code >> largest & 1)) == (p.width, p.k, p.rows, p.largest)
    assert bool(code >> torch_door.ANY_BIT & 1) == (p.layout == "any")
    assert bool(code >> torch_door.MISALIGNED_BIT & 1) == (p.align < 16)
