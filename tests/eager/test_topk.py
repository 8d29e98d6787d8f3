"""torch.topk with eager operators on: values and order as ATen's, the first of equal elements, errors with ATen's
text."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.launch import torch_door
from inductor_plugin import eager, eager_gate, eager_topk

from .conftest import both

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.fixture
def slots(on):
    """(state, width, k) of every slot of the table behind the CPU's door. Whatever is right and ours wins there."""

    def read():
        door = eager._made["topk CPU"].door
        words, table = torch_door.SLOT_WORDS, door._table
        starts = range(words, len(table), words)
        return [tuple(table[at : at + 3]) for at in starts if table[at] != torch_door.EMPTY]

    return read


def expected(x, k, dim=-1, largest=True):
    """By a stable sort: among equal elements the first ones."""
    order = torch.sort(x, dim=dim, descending=largest, stable=True)
    return order.values.narrow(dim, 0, k), order.indices.narrow(dim, 0, k)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_topk(x, k, largest=True, sorted=True):
    values, indices = torch.topk(x, k, -1, largest, sorted)
    order = expected(x, k, -1, largest)[1]
    assert torch.equal(indices, order)
    assert torch.equal(bits(values), bits(x.gather(-1, order))) and values.is_contiguous()
    with eager.enabled(on=False):
        assert torch.equal(values.nan_to_num(7e4), torch.topk(x, k, -1, largest).values.nan_to_num(7e4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [True, False])
def test_shapes(slots, dtype, largest):
    for shape, k in (((5,), 5), ((1, 128), 6), ((3, 4, 77), 10), ((2, 1000), 1), ((7, 300), 300), ((1, 70000), 50)):
        assert_topk(torch.randn(shape).to(dtype), k, largest)
        assert (torch_door.OURS, shape[-1], k) in slots()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 6), width=st.integers(1, 600), share=st.floats(0, 1), dtype=st.sampled_from(DTYPES),
    pad=st.integers(0, 5), offset=st.integers(0, 5), largest=st.booleans(), kinds=st.sampled_from([1, 4, 10**6]),
)  # fmt: skip
def test_any_shape_offset_row_stride_and_ties(on, rows, width, share, dtype, pad, offset, largest, kinds):
    k = max(1, int(share * width))
    buffer = torch.full((rows * (width + pad) + offset,), torch.nan, dtype=dtype)
    x = buffer.as_strided((rows, width), (width + pad, 1), offset)
    x.copy_(torch.randint(-kinds, kinds + 1, (rows, width)) / 8)
    assert_topk(x, k, largest)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.integers(1, 4), max_size=2), width=st.integers(1, 256), share=st.floats(0, 1),
    after=st.lists(st.integers(1, 4), max_size=2), dtype=st.sampled_from(DTYPES), pad=st.integers(0, 3),
    largest=st.booleans(), swapped=st.booleans(), from_end=st.booleans(),
)  # fmt: skip
def test_any_dimension(on, before, width, share, after, dtype, pad, largest, swapped, from_end):
    """The dimension in the middle; rows that are padded, and axes that lie in another order."""
    shape, dim, k = (*before, width, *after), len(before), max(1, int(share * width))
    x = torch.rand(shape).argsort(dim=dim).to(dtype)
    x = torch.nn.functional.pad(x, (0, pad)).narrow(-1, 0, shape[-1])
    if swapped:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    order = expected(x, k, dim, largest)[1]
    values, indices = torch.topk(x, k, dim - len(shape) if from_end else dim, largest)
    assert torch.equal(indices, order) and torch.equal(values, x.gather(dim, order))
    assert values.is_contiguous() and indices.is_contiguous()


def test_other_dimensions_are_ours(slots):
    """Also where results are written to tensors that are given."""
    for shape, dim in (((700, 16), 0), ((3, 900, 5), 1), ((2, 3, 811, 4), -2), ((1024, 8), 0)):
        x, n = torch.randn(shape).mul(8).round(), shape[dim]
        values, order = expected(x, 9, dim)
        out = torch.full_like(values, torch.nan), torch.full_like(order, -1)
        for got in (torch.topk(x, 9, dim), torch.topk(x, 9, dim, out=out)):
            assert torch.equal(got[0], values) and torch.equal(got[1], order)
        assert (torch_door.OURS, n, 9) in slots()


@pytest.mark.parametrize("dtype", OTHERS)
def test_doubles_and_integers(slots, dtype):
    """The least number of a type, whose key is 0, as well; ties; doubles that f32 does not tell apart."""
    if dtype.is_floating_point:
        odd = [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1.0 + 2.0**-50, -(1.0 + 2.0**-50), 5e-324]
    else:
        ends = torch.iinfo(dtype)
        odd = [ends.min, ends.min + 1, ends.max - 1, ends.max, 0, 1]
    few = torch.tensor(odd, dtype=dtype)
    for n, k in ((7, 7), (128, 6), (900, 16)):
        some, least = few[torch.randint(0, len(few), (3, n))], few[:1].expand(3, n).contiguous()
        spread = torch.linspace(0, 250, n).repeat(3, 1).to(dtype)
        for largest in (True, False):
            for x in (some, least, spread):
                values, order = torch.topk(x, k, -1, largest)
                key = torch.where(x.isnan(), torch.nan, x) if dtype.is_floating_point else x
                want = torch.sort(key, dim=-1, descending=largest, stable=True).indices[:, :k]
                assert torch.equal(order, want), (n, k, largest)
                assert torch.equal(values.view(torch.uint8), x.gather(-1, want).view(torch.uint8))
        assert (torch_door.OURS, n, k) in slots()
    x = few[torch.randint(0, len(few), (300, 5))]
    values, order = torch.topk(x, 4, 0)
    given = torch.topk(x, 4, 0, out=(torch.empty_like(values), torch.empty_like(order)))
    assert torch.equal(given[1], order) and torch.equal(values.nan_to_num(7), x.gather(0, order).nan_to_num(7))


def test_rows_at_several_distances(slots):
    """At two distances a kernel takes them, at more a dense copy is made: of equal elements the first ones come first
    here too."""
    x = torch.randint(0, 4, (4, 5, 6, 70)).float()
    views = [(x[:, :3], -1), (x[:, :, ::2], 1), (x[:, 1:4, :5, 3:60], 3), (x[:3, :, 2, 5:], -1), (x[0, :4, ::2], 2)]
    for view, dim in (*views, (x[:, :3, :4], -1), (x[:, :3, :4, ::3], 0)):
        values, indices = torch.topk(view, 3, dim)
        order = expected(view, 3, dim)[1]
        assert torch.equal(indices, order) and torch.equal(values, view.gather(dim, order))
        assert values.is_contiguous() and (torch_door.OURS, view.shape[dim], 3) in slots()


@pytest.mark.parametrize("rows, cut", [
    (1, lambda x: x[:, ::2]), (1, lambda x: x[0, ::2]), (5, lambda x: x[:, :301]), (5, lambda x: x[:, 1:302]),
    (5, lambda x: x[:, :300]), (5, lambda x: x.t().contiguous().t()),
])  # fmt: skip
def test_what_is_measured_is_what_is_called(slots, rows, cut):
    """A case is measured by calls of the very slot that it is decided for: by others it would be ATen's, who takes any
    of equal elements."""
    x = cut(torch.randint(0, 9, (rows, 640), dtype=torch.int8))
    indices = torch.topk(x, 99).indices
    assert (torch_door.OURS, x.shape[-1], 99) in slots()
    assert torch.equal(indices, expected(x, 99)[1])


def test_copies_of_uneven_rows_are_freed(on):
    held = torch.randn(4, 5, 3, 700)[:, :3, :2]
    torch.topk(held, 5)
    before = len(torch.topk(held, 5)[0])
    import resource

    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4000):  # each copy has 67 KB
        torch.topk(held, 5)
    assert before == 4 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 100_000  # KB, not 268,000


def test_out_that_overlaps_a_transposed_input_is_atens_error(prefer_ours):
    def call():
        x = torch.arange(600.0).view(200, 3)
        return torch.topk(x, 2, 0, out=(x.view(-1)[500:506].view(2, 3), torch.empty(2, 3, dtype=torch.int64)))

    ours, aten = both(call)
    assert ours == aten and "memory location" in ours[1]


def test_nan_signs_and_zeros(on):
    """pytorch#117617: NaN of both signs; also infinities, and -0 beside +0."""
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0])
    for dtype in DTYPES:
        for largest in (True, False):
            x = odd.to(dtype)[torch.randint(0, len(odd), (6, 500))]
            for k in (1, 7, 100, 500):
                assert_topk(x, k, largest)


def test_nans_keep_their_bits(on):
    """Signs and payloads, of signalling ones as well; among them the first come first."""
    some = {
        torch.float32: [0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x80000000],
        torch.bfloat16: [0x7FC1, 0xFFC5, 0x7F81, 0xFF81, 0x7FFF, 0x7F80, 0xFF80, 0x8000],
        torch.float16: [0x7E01, 0xFE05, 0x7C01, 0xFC01, 0x7FFF, 0x7C00, 0xFC00, 0x8000],
    }
    for dtype, patterns in some.items():
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        size = 1 << torch.iinfo(whole).bits
        signed = torch.tensor([p - size if 2 * p >= size else p for p in patterns], dtype=whole)
        x = signed[torch.randint(0, len(signed), (4, 400))].view(dtype)
        nan = x.isnan()
        for largest in (True, False):
            for k in (3, 90, 400):
                values, indices = torch.topk(x, k, -1, largest)
                key = torch.where(nan, torch.inf, x.float().clamp(-3e38, 3e38))
                order = torch.sort(key, dim=-1, descending=largest, stable=True).indices[:, :k]
                assert torch.equal(indices, order), (dtype, largest, k)
                assert torch.equal(bits(values), bits(x).gather(1, order)), (dtype, largest, k)


@pytest.mark.parametrize("data", ["ascending", "descending", "constant", "two values"])
def test_adversarial_data(on, data):
    n = 20000
    made = {
        "ascending": torch.arange(n) / 7, "descending": -torch.arange(n) / 7, "constant": torch.ones(n),
        "two values": torch.arange(n) % 2 * 1.0,
    }  # fmt: skip
    for k in (1, 64, 1000):
        assert_topk(made[data].repeat(2, 1), k)


def test_a_row_with_nans_is_judged_by_the_stable_sort():
    """As ATen's GPU kernels order NaNs of both signs one way or the other (pytorch#117617), they are no measure."""
    x = torch.tensor([[1.0, -torch.nan, torch.nan, 2.0]])
    values, indices = expected(torch.where(x.isnan(), torch.nan, x), 4)
    theirs = torch.tensor([[torch.nan, 2.0, 1.0, -torch.nan]])
    eager_topk.check((values, indices), x, 4, -1, True, (theirs, None))
    for wrong in ([[2, 1, 3, 0]], [[1, 2, 0, 3]]):  # of equals the second first; a lesser one first
        wrong = torch.tensor(wrong)
        with pytest.raises(eager_gate.Wrong):
            eager_topk.check((x.gather(1, wrong), wrong), x, 4, -1, True, (theirs, None))


def test_rows_far_apart(on):
    """pytorch#191447: spans over 2 GiB; memory that is never touched takes no room."""
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    assert_topk(x, 5)


def test_just_past_powers_of_two(on):
    """pytorch#190843."""
    for n in (4097, 8193, 16385):
        assert_topk(torch.randn(3, n), 9)


ATENS = {
    "k = 0": lambda: torch.topk(torch.randn(3, 5), 0),
    "k > N": lambda: torch.topk(torch.randn(3, 5), 6),
    "k < 0": lambda: torch.topk(torch.randn(3, 5), -1),
    "k = 0 along another dim": lambda: torch.topk(torch.randn(3, 5), 0, 0),
    "k > N along another dim": lambda: torch.topk(torch.randn(3, 5), 4, 0),
    "0 rows along another dim": lambda: torch.topk(torch.randn(5, 0), 2, 0),
    "uneven rows along another dim": lambda: torch.topk(torch.arange(120.0).view(4, 5, 6)[:, :3], 2, 0),
    "dim past the end": lambda: torch.topk(torch.randn(3, 5), 2, 2),
    "dim before the start": lambda: torch.topk(torch.randn(3, 5), 2, -3),
    "another dim": lambda: torch.topk(torch.randn(3, 5), 2, 0),
    "the last dim by number": lambda: torch.topk(torch.randn(3, 5), 2, 1),
    "smallest, any order": lambda: torch.topk(torch.randn(3, 5), 5, -1, False, False)[0].sort().values,
    "a number": lambda: torch.topk(torch.tensor(3.0), 1),
    "a number, k = 2": lambda: torch.topk(torch.tensor(3.0), 2),
    "0 rows": lambda: torch.topk(torch.randn(0, 5), 2),
    "0 columns": lambda: torch.topk(torch.randn(5, 0), 0),
    "0 columns, k = 1": lambda: torch.topk(torch.randn(5, 0), 1),
    "0 rows, k > N": lambda: torch.topk(torch.randn(0, 5), 6),
    "0 in the middle": lambda: torch.topk(torch.randn(2, 0, 3), 2),
    "uneven rows, k = 0": lambda: torch.topk(torch.randn(4, 5, 6)[:, :3], 0),
    "uneven rows, k > N": lambda: torch.topk(torch.randn(4, 5, 6)[:, :3], 7),
    "float64": lambda: torch.topk(torch.randn(3, 5).double(), 2),
    "integers": lambda: torch.topk(torch.randperm(15).view(3, 5), 2),
    "booleans": lambda: torch.topk(torch.ones(3, 5).bool(), 2),
    "complex": lambda: torch.topk(torch.randn(3, 5, dtype=torch.complex64), 2),
    "float8": lambda: torch.topk(torch.randn(3, 5).to(torch.float8_e4m3fn), 2),
    "strided columns": lambda: torch.topk(torch.randn(3, 10)[:, ::2], 2),
    "expanded": lambda: torch.topk(torch.randn(5).expand(3, 5), 2),
    "uneven rows": lambda: torch.topk(torch.randn(4, 5, 6)[:, :3], 2),
    "transposed": lambda: torch.topk(torch.randn(5, 3).t(), 2),
    "17 axes": lambda: torch.topk(torch.randn([1] * 16 + [5]), 2),
    "meta": lambda: torch.topk(torch.randn(3, 5, device="meta"), 2),
    "not a tensor": lambda: torch.topk([1.0, 2.0], 1),
    "quantized": lambda: torch.topk(torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 0, torch.qint8), 2),
    "conjugate view": lambda: torch.topk(torch.randn(3, 5, dtype=torch.complex64).conj().imag, 2),
}


def described(result):
    if isinstance(result, torch.Tensor):
        held = result.dequantize() if result.is_quantized else result
        content = held.float().nan_to_num(7.5).tolist() if result.device.type == "cpu" else None
        return str(result.dtype), tuple(result.shape), result.stride(), str(result.device), content
    return tuple(map(described, result)) if not isinstance(result, (str, type)) else result


def test_sparse_tensors_are_refused_as_before(prefer_ours):
    ours, aten = both(lambda: torch.topk(torch.eye(3).to_sparse(), 1))
    until = "is only available for these backends"  # what follows says where each kernel was registered
    assert ours[0] is aten[0] is NotImplementedError and ours[1].split(until)[0] == aten[1].split(until)[0]
    assert "torch_library.py" in ours[1].split(until)[1]  # a name that PyTorch reads long after it was given


@pytest.mark.parametrize("name", ATENS)
def test_same_as_aten(prefer_ours, name):
    """Results with dtype, strides and device, or the error's type and text."""
    ours, aten = both(ATENS[name])
    assert described(ours) == described(aten)


def outs(values, indices):
    return lambda: torch.topk(torch.arange(15.0).view(3, 5), 2, out=(values(), indices()))


BASE = torch.zeros(64)
OUTS = {
    "fitting": (lambda: torch.empty(3, 2), lambda: torch.empty(3, 2, dtype=torch.int64)),
    "empty": (lambda: torch.empty(0), lambda: torch.empty(0, dtype=torch.int64)),
    "transposed": (lambda: torch.empty(2, 3).t(), lambda: torch.empty(2, 3, dtype=torch.int64).t()),
    "strided": (lambda: torch.empty(3, 4)[:, ::2], lambda: torch.empty(3, 6, dtype=torch.int64)[:, ::3]),
    "padded rows": (lambda: torch.empty(3, 7)[:, :2], lambda: torch.empty(3, 9, dtype=torch.int64)[:, :2]),
    "wrong values": (lambda: torch.empty(3, 2, dtype=torch.float64), lambda: torch.empty(3, 2, dtype=torch.int64)),
    "wrong indices": (lambda: torch.empty(3, 2), lambda: torch.empty(3, 2, dtype=torch.int32)),
    "on meta": (lambda: torch.empty(3, 2, device="meta"), lambda: torch.empty(3, 2, dtype=torch.int64)),
    "expanded": (lambda: torch.empty(1, 2).expand(3, 2), lambda: torch.empty(3, 2, dtype=torch.int64)),
    "sharing memory": (lambda: BASE[:6].view(3, 2), lambda: BASE.view(torch.int64)[:6].view(3, 2)),
    "too large": (lambda: torch.empty(4, 4), lambda: torch.empty(4, 4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out(prefer_ours, name):
    ours, aten = both(outs(*OUTS[name]))
    assert described(ours) == described(aten)


def test_out_that_overlaps_the_input_is_atens_error(prefer_ours):
    def call():
        x = torch.arange(12.0).view(1, 12)
        return torch.topk(x, 2, out=(x[:, :2], torch.empty(1, 2, dtype=torch.int64)))

    ours, aten = both(call)
    assert ours == aten and "memory location" in ours[1]


def test_out_is_written_and_returned(slots):
    x, values, indices = torch.randn(4, 900), torch.full((4, 8), torch.nan), torch.full((4, 8), -1)
    given = torch.topk(x, 8, out=(values, indices))
    assert given[0] is values and given[1] is indices and (torch_door.OURS, 900, 8) in slots()
    want, order = expected(x, 8)
    assert torch.equal(values, want) and torch.equal(indices, order)


def test_gradients(slots):
    x = torch.randn(4, 50, requires_grad=True)
    values, indices = torch.topk(x, 5)
    assert (torch_door.OURS, 50, 5) in slots() and not indices.requires_grad
    (values * torch.arange(5.0)).sum().backward()
    want = torch.zeros(4, 50).scatter_(1, indices, torch.arange(5.0).repeat(4, 1))
    assert torch.equal(x.grad, want)


def test_an_error_gives_the_input_back(on):
    """ATen's exceptions pass through machine code of ours; what it held must be released."""
    for wrong in ({"k": 3, "dim": 4}, {"k": 100}, {"k": 1, "out": (torch.empty(2, 1).int(), torch.empty(2, 1).long())}):
        freed = []
        memory = (ctypes.c_float * 18)()
        x = torch.frombuffer(memory, dtype=torch.float32).view(2, 9)
        weakref.finalize(memory, freed.append, True)
        with pytest.raises((IndexError, RuntimeError)):
            torch.topk(x, **wrong)
        del x, memory
        gc.collect()
        assert freed


def test_python_threads(on):
    x = torch.randn(16, 5000)
    want, wrong = expected(x, 20), []
    torch.topk(x, 20)

    def work():
        for _ in range(50):
            values, indices = torch.topk(x, 20)
            if not (torch.equal(values, want[0]) and torch.equal(indices, want[1])):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_more_calls_than_slots(on):
    """The table grows, and nothing is decided twice."""
    from inductor_plugin.counters import counters

    door = eager._made["topk CPU"].door
    before = door._slots
    x = torch.randn(1, 300)
    for n in range(1, 300):
        torch.topk(x[:, :n], 1)
        torch.topk(x[:, :n], min(n, 2))
    for state in range(6000):
        door.put(10**6 + state, 1, 0, torch_door.ATEN)
    measured = counters["benchmarks"]
    assert door._slots > before
    for n in range(1, 300):
        values, indices = torch.topk(x[:, :n], 1)
        assert values.item() == x[0, :n].max() and indices.item() == x[0, :n].argmax()
    assert counters["benchmarks"] == measured


def test_the_number_of_threads_may_change(on):
    x, before = torch.randn(1, 100000), torch.get_num_threads()
    want = expected(x, 30)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = torch.topk(x, 30)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    finally:
        torch.set_num_threads(before)
