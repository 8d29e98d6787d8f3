"""What a kernel author sees: the kernel, their line, what is wrong, what to do."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass

import pytest

from flykernels.codeobject import Extent
from flykernels.lang import (
    Global,
    Layout,
    Mode,
    Swizzle,
    ThreadValues,
    TraceError,
    bf16,
    constant,
    f32,
    i32,
    select,
    trace,
)
from flykernels.targets import amd_link, gfx950, sm90a


@dataclass(frozen=True)
class Wave:
    workgroup_size: int = 64


TV = ThreadValues((1, 64), (Mode(64, 1, 1),), Mode(1, 1, 1), (Mode(1, 1, 64),))
DOWN = ThreadValues((64, 64), (Mode(64, 1, 1),), Mode(4, 0, 1), (Mode(16, 0, 4),))


def carries_nothing(k, x, y):
    @k.loop(0, 4, carry=k.thread)  # here
    def t(i, t):
        pass


def mixes_types(k, x, y):
    k.fragment(TV).load(x) + k.fragment(TV).load(y)  # here


def asks_for_truth(k, x, y):
    if k.thread < 3:  # here
        pass


def column(k, x, y):
    k.fragment(DOWN).load(x)  # here


def leaks(k, x, y):
    out = []

    @k.loop(0, 4)
    def _(i):
        out.append(i + 1)

    k.fragment(TV).store(x, k.fragment(TV).load(x) + out[0].to(f32))  # here


def indexes_a_swizzle(k, x, y):
    k.shared(bf16, Layout.compact(64, 64), Swizzle(3, 3, 3))[k.thread]  # here


def too_few_axes(k, x, y):
    k.fragment(ThreadValues((64,), (Mode(64, 0, 1),), Mode(1, 0, 1))).load(x)  # here


def selects_numbers(k, x, y):
    select(k.thread < 3, 1, 2)  # here


def divides_floats(k, x, y):
    constant(1.0, f32) // 2  # here


def adds_a_float(k, x, y):
    k.thread + 0.5  # here


def raises(k, x, y):
    {}["missing"]  # here


def too_much_lds(k, x, y):
    k.shared(f32, Layout.compact(64, 1024))


CASES = {
    carries_nothing: ("carries", "return from the body"), mixes_types: ("differ in type", ".to("),
    asks_for_truth: ("no truth", "select"), column: ("not contiguous", "elementwise"),
    leaks: ("outside the loop", "carry"),
    indexes_a_swizzle: ("swizzle", "multiple of 512"), too_few_axes: ("axes", "view[i]"),
    selects_numbers: ("numbers", "constant"), divides_floats: ("integers", "divide with /"),
    adds_a_float: ("float", ".to(f32)"), raises: ("missing", ""), too_much_lds: ("262144 bytes", "fewer stages"),
}  # fmt: skip


@pytest.mark.parametrize("body", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("target", [gfx950, sm90a], ids=lambda t: t.name)
def test_errors_name_kernel_line_and_remedy(body, target):
    def kernel(k, p, c):
        x, y = k.args(x=Global(f32, (64, 64)), y=Global(bf16, (64, 64)))
        body(k, x, y)

    with pytest.raises(TraceError) as caught:
        target.compile(trace(kernel, target, None, Wave(), name="mine"))
    wrong, remedy = CASES[body]
    assert wrong in caught.value.wrong and remedy in caught.value.do and caught.value.kernel == "mine"
    source, first = inspect.getsourcelines(body)
    marked = [first + i for i, line in enumerate(source) if "# here" in line]
    if marked:
        assert (caught.value.file, caught.value.line) == (__file__, marked[0])
        assert source[marked[0] - first].strip() == caught.value.source
    assert all(part in str(caught.value) for part in ("mine", wrong, remedy))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_size_that_is_no_argument():
    def kernel(k, p, c):
        k.args(x=Global(f32, ("rows", 64)), m=i32)

    with pytest.raises(TraceError, match=r"'rows'(.|\n)*declare it"):
        trace(kernel, gfx950, None, Wave())


@pytest.mark.parametrize("size", [0, 63, 65, 2048])
def test_workgroups_are_whole_waves(size):
    with pytest.raises(TraceError, match="whole waves"):
        trace(lambda k, p, c: k.args(m=i32), gfx950, None, Wave(size), name="k")


@pytest.mark.parametrize("name", [None, "a-b", "größe", "1st", 'a"b'])
def test_names_that_no_assembler_takes(name):
    for target in (gfx950, sm90a):
        with pytest.raises(TraceError, match=r"cannot be named '(.|\n)*say name="):
            trace(lambda k, p, c: k.args(m=i32), target, None, Wave(), name=name)


def test_without_a_linker_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(amd_link, "find_lld", lambda: None)
    monkeypatch.setattr(amd_link, "find_triton", lambda: None)
    k = trace(lambda k, p, c: k.args(m=i32), gfx950, None, Wave(), name="k")
    with pytest.raises(amd_link.LinkerMissing, match="pip install triton"):
        gfx950.compile(k)


def test_a_code_object_says_what_it_is():
    def kernel(k, p, c):
        k.grid = ((Extent("m", 64),),)
        k.args(x=Global(f32, ("m",)), m=i32)

    code = gfx950.compile(trace(kernel, gfx950, {"size": 3}, Wave()), source={"template": "mine"})
    assert [(a.name, a.kind, a.dtype) for a in code.arguments] == [("x", "pointer", "f32"), ("m", "i32", "i32")]
    assert code.grid_for({"m": 65}) == (2,) and code.source["problem"] == {"size": 3}
    assert code.source["template"] == "mine" and code.source["config"] == {"workgroup_size": 64}
    assert code.binary.startswith(b"\x7fELF") and ".amdgcn_target" in code.text
    assert type(code).from_bytes(code.to_bytes()) == code
    assert str(__file__) not in code.text and __file__.encode() not in code.binary
