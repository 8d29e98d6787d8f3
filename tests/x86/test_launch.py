"""Loading and calling x86 code objects: without MLIR, never with damaged bytes, never writable and executable."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flykernels import cpu
from flykernels.codeobject import Argument, CodeObject, Extent
from flykernels.dtypes import f32, i64
from flykernels.lang import Global, trace
from flykernels.launch import host
from flykernels.launch.elf import ElfError, Image
from flykernels.launch.outside import POOL
from flykernels.targets import x86
from flykernels.targets.x86 import X86

ROOT = Path(__file__).resolve().parents[2]


class Config:
    workgroup_size = 1


def double(k, per, _):
    """y[i] = 2 x[i] + (the thread's scratch, put there first), `per` elements a workgroup."""
    x, y, n = k.args(x=Global(f32, (1,)), y=Global(f32, (1,)), n=i64)
    k.grid = ((Extent("n", per),),)
    scratch = k.private(f32, per)
    first = k.workgroup_id().to(i64) * per

    @k.loop(0, per)
    def _(i):
        @k.when(first + i.to(i64) < n)
        def _():
            scratch.put(x.get(first + i.to(i64)), i)
            y.put(scratch.get(i) * 2.0, first + i.to(i64))


@pytest.fixture(scope="module")
def code() -> CodeObject:
    return x86.compile(trace(double, x86, 16, Config()), source={"test": "double"})


def test_signature_grid_and_workspace(code):
    assert code.arguments == (
        Argument("x", "pointer", "f32"),
        Argument("y", "pointer", "f32"),
        Argument("n", "i64", "i64"),
    )
    assert code.grid_for({"n": 33}) == (3,) and code.workspace_for({}) == 64
    assert (code.target, code.entry) == ("x86", "_mlir_double")
    assert set(code.features.split(",")) <= cpu.features()


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_every_element_once(code, threads):
    kernel = host.load(CodeObject.from_bytes(code.to_bytes()))
    for n in (0, 1, 16, 17, 1000):
        x, y = torch.arange(n + 1.0), torch.full((n + 1,), -1.0)
        kernel(x.data_ptr(), y.data_ptr(), n, threads=threads)
        assert torch.equal(y[:n], 2 * x[:n]) and y[n] == -1


def test_bind_fixes_the_trailing_arguments(code):
    kernel = host.load(code)
    x, y = torch.arange(100.0), torch.zeros(100)
    kernel.bind(70, threads=2)(x.data_ptr(), y.data_ptr())
    assert torch.equal(y[:70], 2 * x[:70]) and (y[70:] == 0).all()
    kernel.bind(threads=1)(x.data_ptr(), y.data_ptr(), 100)
    assert torch.equal(y, 2 * x)


def test_the_door_from_python(code):
    kernel = host.load(code)
    x, y = torch.arange(100.0), torch.zeros(100)
    two, free = kernel.launcher(threads=2), kernel.launcher()
    del kernel
    for _ in range(1000):
        assert two(x.data_ptr(), y.data_ptr(), 70) == min(2, torch.get_num_threads())
    assert torch.equal(y[:70], 2 * x[:70]) and (y[70:] == 0).all()
    assert free(x.data_ptr(), y.data_ptr(), 100) == torch.get_num_threads()
    assert torch.equal(y, 2 * x)
    for wrong in ((), (1,), (x.data_ptr(), y.data_ptr(), 1, 2), ("a", y.data_ptr(), 1), (x.data_ptr(), None, 1)):
        with pytest.raises(TypeError):
            two(*wrong)


def test_python_threads_in_the_door_have_workspaces_of_their_own(code):
    big = x86.compile(trace(double, x86, 1 << 20, Config(), name="double_door"))
    launch, n = host.load(big).launcher(threads=1), 1 << 22
    xs, ys = [torch.rand(n) for _ in range(3)], [torch.zeros(n) for _ in range(3)]

    def call(i):
        for _ in range(5):
            launch(xs[i].data_ptr(), ys[i].data_ptr(), n)

    workers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert all(torch.equal(y, 2 * x) for x, y in zip(xs, ys))


def test_the_workspace_grows_with_the_number_of_threads(code):
    launch, n = host.load(code).launcher(), 1000
    x, y, before = torch.rand(n), torch.zeros(n), torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            y.zero_()
            assert launch(x.data_ptr(), y.data_ptr(), n) == threads
            assert torch.equal(y, 2 * x)
    finally:
        torch.set_num_threads(before)


def test_compiling_twice_gives_the_same_bytes(code):
    again = x86.compile(trace(double, x86, 16, Config()), source={"test": "double"})
    assert again.to_bytes() == code.to_bytes()


def test_a_second_process_needs_no_mlir(code, tmp_path):
    file = tmp_path / "kernel"
    code.save(file)
    script = f"""
import sys
from array import array
from flykernels.codeobject import CodeObject
from flykernels.launch import host
x, y = array("f", range(50)), array("f", [0] * 50)
kernel = host.load(CodeObject.load({str(file)!r}))
kernel(x.buffer_info()[0], y.buffer_info()[0], 50, threads=2)
assert list(y) == [2.0 * i for i in range(50)], list(y)
assert not [m for m in sys.modules if "mlir" in m or "flydsl" in m or m in ("torch", "numpy")], "too much loaded"
print("ran")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ran\n", done.stderr


def test_the_gil_is_released_and_workspace_is_the_threads_own(code):
    big = x86.compile(trace(double, x86, 1 << 20, Config(), name="double_big"))
    kernel = host.load(big)
    n = 1 << 22
    x, ys = torch.rand(n), [torch.zeros(n) for _ in range(2)]
    ticks, done = [], threading.Event()

    def call(y):
        for _ in range(10):
            kernel(x.data_ptr(), y.data_ptr(), n, threads=1)

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    workers = [threading.Thread(target=call, args=(y,)) for y in ys]
    watcher = threading.Thread(target=tick)
    watcher.start()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    done.set()
    watcher.join()
    assert all(torch.equal(y, 2 * x) for y in ys)
    assert len(ticks) > 5  # had a call held the GIL, the watcher would not have run beside it


def test_threads_come_from_torchs_own_library():
    lines = Path("/proc/self/maps").read_text().splitlines()
    where = {}
    for line in lines:
        span, path = line.split()[0], line.split()[-1]
        low, high = (int(x, 16) for x in span.split("-"))
        where[low, high] = path
    owner = lambda address: next(p for (low, high), p in where.items() if low <= address < high)
    pool = host.thread_pool()
    assert set(POOL) < set(pool)
    assert len({owner(a) for a in pool.values()}) == 1
    assert str(Path(torch.__file__).parent) in owner(pool["GOMP_parallel"])


# -- what is refused
def test_code_is_never_writable_and_executable(code):
    kernel = host.load(code)
    base = kernel.image._base
    spans = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    inside = [mode for span, mode in spans if int(span.split("-")[0], 16) <= base < int(span.split("-")[1], 16)]
    assert inside and all("x" in mode and "w" not in mode for mode in inside)


def test_a_processor_that_lacks_something_is_told_what(code):
    with pytest.raises(host.LaunchError, match="avx1024"):
        host.load(replace(code, features=code.features + ",avx1024"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target": "gfx950"}, "gfx950"),
        ({"entry": "nobody"}, "nobody"),
        ({"arguments": (Argument("x", "f128", "f128"),)}, "f128"),
        ({"binary": b""}, "ELF|cut off"),
        ({"binary": b"\x7fELF" + bytes(200)}, "ELF"),
    ],
)
def test_a_wrong_object_is_an_error_not_a_crash(code, change, says):
    with pytest.raises(host.LaunchError, match=says):
        host.load(replace(code, **change))


def test_a_wrong_number_of_arguments_is_an_error(code):
    with pytest.raises(TypeError, match="3 arguments, not 2"):
        host.load(code)(1, 2)


def test_cut_anywhere_it_is_refused_or_whole(code):
    """An object cut short may still hold all that is loaded (the section table is last), but must never crash."""
    refused = 0
    for end in range(0, len(code.binary), 7):
        try:
            Image(code.binary[:end], lambda name: None)
        except ElfError:
            refused += 1
    assert refused == len(range(0, len(code.binary), 7))


def test_changed_bytes_in_tables_are_refused_or_harmless(code):
    """Every byte of the headers and tables set to 0xff: an error, or an image that stayed inside its memory."""
    table = struct.unpack_from("<Q", code.binary, 40)[0]
    refused = 0
    for at in [*range(64), *range(table, len(code.binary))]:
        damaged = code.binary[:at] + b"\xff" + code.binary[at + 1 :]
        try:
            Image(damaged, lambda name: None)
        except ElfError:
            refused += 1
    assert refused > 100


def test_a_symbol_that_nobody_has_is_named(code):
    with pytest.raises(ElfError, match="flykernels_nothing"):
        Image(code.binary, lambda name: None).write("flykernels_nothing", b"x")


def test_code_for_another_level_compiles_and_is_checked():
    wide = X86("x86-64-v4")
    code = wide.compile(trace(double, wide, 16, Config()))
    assert "avx512f" in code.features
    if not set(cpu.needed("x86-64-v4")) <= cpu.features():
        with pytest.raises(host.LaunchError, match="avx512"):
            host.load(code)
    else:
        x, y = torch.arange(40.0), torch.zeros(40)
        host.load(code)(x.data_ptr(), y.data_ptr(), 40)
        assert torch.equal(y, 2 * x)


def test_without_an_openmp_library_calls_are_serial(code, monkeypatch):
    monkeypatch.setattr(host, "thread_pool", dict)
    kernel = host.load(code)
    x, y = torch.arange(100.0), torch.zeros(100)
    kernel(x.data_ptr(), y.data_ptr(), 100, threads=4)
    assert torch.equal(y, 2 * x)
    y.zero_()
    kernel.launcher(4)(x.data_ptr(), y.data_ptr(), 100)
    assert kernel.threads == 1 and torch.equal(y, 2 * x)


def test_kernels_are_compiled_in_several_threads_at_once(code):
    """As Inductor's precompilation does on Python 3.12: a target is shared, a kernel's state is its own."""
    from concurrent.futures import ThreadPoolExecutor

    sizes = [16, 32, 64, 128] * 3
    build = lambda n: x86.compile(trace(double, x86, n, Config(), name=f"double_{n}"))
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            codes = list(pool.map(build, sizes))
    finally:
        sys.setswitchinterval(switch)
    for n, made in zip(sizes, codes):
        assert made.binary == build(n).binary
        x, y = torch.arange(200.0), torch.zeros(200)
        host.load(made)(x.data_ptr(), y.data_ptr(), 200, threads=2)
        assert torch.equal(y, 2 * x)
