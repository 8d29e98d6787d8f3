"""CUDA devices as the plugin sees them, with a torch that says it has an H200, and a recording library for libcuda."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flykernels.codeobject import Argument, CodeObject, Extent, TensorMap
from flykernels.launch import cuda
from inductor_plugin import bind_gpu, choices, devices, install, kernels, measure, private, requests, settings
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem
from tests.launch.recorder import RecordingCuda
from tuning_cache import FAILED, Key

NT = GemmProblem(64, 32, "bf16", "bf16", "row", "col")


@pytest.fixture
def h200(monkeypatch):
    """A torch that says it has H200s; the first is current."""
    found = SimpleNamespace(major=9, minor=0, name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0x77))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    return found


@pytest.mark.parametrize("arch", [(9, 0), (8, 0), (10, 0), (12, 1)])
def test_code_for_sm_90a_is_offered_on_sm_90_alone(h200, arch):
    h200.major, h200.minor = arch
    if arch != (9, 0):
        with pytest.raises(requests.NotEligible, match=f"is cuda .sm_{arch[0]}{arch[1]}.: .*cuda .sm_90."):
            devices.device_for(torch.device("cuda", 0))
        assert devices.here("sm90a") is None
        return
    device = devices.device_for(torch.device("cuda", 0))
    assert device.target == "sm90a" and devices.here("sm90a") is device
    wanted = {"arch": "sm_90", "product": "NVIDIA H200", "compute_units": 132}
    assert device.description() == device.description(torch.device("cuda", 1)) == wanted


def made(p: GemmProblem = NT, split: bool = False, tma: bool = True) -> CodeObject:
    pointer = lambda n: Argument(n, "pointer", "bf16")
    listed = [pointer(n) for n in arguments.pointers(p)] + [Argument(n, "i64", "i64") for n in arguments.scalars(p)]
    listed += [pointer("workspace")] if split else []
    maps = [TensorMap("a_map", "a", ((p.k, 1), ("m", "a_row")), (32, 64), 64)] if tma else []
    workspace = (Extent("m", 64), Extent(1024)) if split else ()
    return CodeObject(
        "sm90a", "sm_90a", "gemm", tuple(listed), ((Extent("m", 64), Extent(p.n, 64)),), 256, workspace=workspace,
        tensor_maps=tuple(maps), dynamic_bytes=50_000, binary=b"binary",
    )  # fmt: skip


def bound(monkeypatch, code: CodeObject, p: GemmProblem = NT):
    library = RecordingCuda(code)
    monkeypatch.setattr(cuda, "runtime", lambda: cuda.Cuda(library))
    return bind_gpu.bind(code, kernels.Spec("mm", "sm90a", p, {"tile_m": 64})), library


def aligned(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).to(torch.bfloat16)  # torch's CPU memory is aligned to 64 bytes


def test_a_call_launches_on_the_current_stream(h200, monkeypatch):
    call, library = bound(monkeypatch, made())
    a, w, out = aligned(100, 32), aligned(64, 32), aligned(100, 64)
    assert call(a, w.t(), out=out) is out
    values = [a.data_ptr(), w.data_ptr(), out.data_ptr(), 100, 32, 32, 64]
    launched = (0x2000, (2, 1, 1), (256, 1, 1), 50_000, 0x77, values, [a.data_ptr()], None)
    call(a, w.t(), out=out)
    assert library.named("cuLaunchKernelEx") == [launched, launched]
    assert len(library.named("cuModuleLoadDataEx")) == 1


@pytest.mark.parametrize("what", ["offset", "stride", "layout", "repeated rows"])
def test_operands_that_tma_cannot_read_go_to_aten(h200, monkeypatch, what):
    p = replace(NT, align_a=2)  # the problem promised nothing: the tensor map asks for it
    call, library = bound(monkeypatch, made(p), p)
    a, w, out = aligned(4, 32), aligned(64, 32), aligned(4, 64)
    if what == "offset":
        a = aligned(1, 4 * 32 + 1)[0, 1:].view(4, 32)
    elif what == "stride":
        a = aligned(4, 33)[:, :32]
    elif what == "layout":
        a = aligned(32, 4).t()
    else:
        a = aligned(1, 32).expand(4, 32)
    call(a, w.t(), out=out)
    assert not library.named("cuLaunchKernelEx")
    assert torch.allclose(out.float(), a.float() @ w.t().float(), atol=0.3)


def test_without_tensor_maps_only_what_the_problem_promises_is_asked(h200, monkeypatch):
    p = replace(NT, align_a=2)
    call, library = bound(monkeypatch, made(p, tma=False), p)
    call(aligned(4, 33)[:, :32], aligned(64, 32).t(), out=aligned(4, 64))
    assert len(library.named("cuLaunchKernelEx")) == 1


def test_how_far_the_next_row_would_be_does_not_matter_to_one_row(h200, monkeypatch):
    call, library = bound(monkeypatch, made())
    for stride in ((0, 1), (1, 1), (32, 1)):  # Inductor gives an axis of one element any of them
        call(aligned(1, 32).as_strided((1, 32), stride), aligned(64, 32).t(), out=aligned(1, 64))
    assert len(library.named("cuLaunchKernelEx")) == 3


def test_a_bias_that_begins_between_words_goes_to_aten(h200, monkeypatch, log):
    p = replace(NT, bias="row")
    call, library = bound(monkeypatch, made(p), p)
    a, w, whole, out = aligned(4, 32), aligned(64, 32), aligned(1, 65)[0], aligned(4, 64)
    call(a, w.t(), whole[:64], out=out)
    assert len(library.named("cuLaunchKernelEx")) == 1
    for _ in range(2):
        call(a, w.t(), whole[1:], out=out)
    assert len(library.named("cuLaunchKernelEx")) == 1 and log.text.count("not laid out") == 1
    assert torch.allclose(out.float(), a.float() @ w.t().float() + whole[1:].float(), atol=0.3)


def test_no_memory_for_workspace_is_aten_s_call(h200, monkeypatch, log):
    call, library = bound(monkeypatch, made(split=True))
    a, w, out = aligned(4, 32), aligned(64, 32), aligned(4, 64)
    library.fail["cuMemAlloc_v2"] = 2
    call(a, w.t(), out=out)
    assert not library.named("cuLaunchKernelEx") and "ATen serves this call" in log.text
    assert torch.allclose(out.float(), a.float() @ w.t().float(), atol=0.3)
    library.fail = {"cuMemAlloc_v2": 700}
    with pytest.raises(cuda.CudaError, match="ILLEGAL_ADDRESS"):
        call(a, w.t(), out=out)


# -- while measuring and capturing


@pytest.fixture
def candidate():
    """A measurement on the CPU, as any device's is made."""
    p = GemmProblem(32, 16, "f32", "f32", "row", "row")
    meta = lambda *size: private.load().names.TensorMeta(
        torch.device("cpu"), torch.float32, list(size), [size[1], 1], 0, None
    )
    key = Key("mm", p.key(), {"arch": "test"}, {})
    spec = kernels.Spec("mm", "x86", p, {"tile": 1})
    return measure.request(spec, key, [meta(8, 16), meta(16, 32)], meta(8, 32))


def test_a_lack_of_memory_is_tried_again_and_never_held_against_the_candidate(candidate, monkeypatch, log):
    tried, freed = [], []

    def no_memory(spec):
        tried.append(spec)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(kernels, "code_for", no_memory)
    monkeypatch.setattr(devices, "free_memory", lambda: freed.append(1))
    assert candidate.benchmark() == FAILED
    assert len(tried) == 2 and len(freed) == 1 and "no memory left" in log.text
    timing = settings.store().lookup(candidate.key).timings[candidate.spec.name]
    assert timing.quarantined is None and timing.microseconds is None


def test_a_candidate_whose_process_died_is_quarantined(candidate):
    made = choices.Choice.__new__(choices.Choice)
    made.spec, made.name = candidate.spec, "ours"
    made.request = SimpleNamespace(key=candidate.key)
    names = private.load().names
    aten = names.ExternKernelCaller.__new__(names.ExternKernelCaller)
    aten.name = "mm"
    choices.record({made: FAILED, aten: 0.5}, "mm", [], [made, aten])
    entry = settings.store().lookup(candidate.key)
    assert "process has probably ended" in entry.timings[candidate.spec.name].quarantined
    assert entry.winner == "aten mm"


def test_the_check_looks_at_every_row(monkeypatch):
    monkeypatch.setattr(measure, "COMPARED_AT_ONCE", 3 * 32)
    for batch in ((), (5,)):
        p = GemmProblem(32, 16, "f32", "f32", batched=bool(batch), bias="full", residual=True)
        spec = kernels.Spec("mm", "x86", p, {})
        a, b = torch.randn(*batch, 10, 16), torch.randn(*batch, 16, 32)
        bias, residual = torch.randn(*batch, 10, 32), torch.randn(*batch, 10, 32)
        right = a @ b + bias + residual
        measure.check(spec, [a, b, bias, residual], right)
        for row in (0, 4, 9):
            wrong = right.clone()
            wrong[..., row, 7] += 0.1
            with pytest.raises(measure.Wrong, match="differ from ATen"):
                measure.check(spec, [a, b, bias, residual], wrong)


def test_autotuning_without_memory_goes_on_with_aten(monkeypatch, log):
    names = private.load().names
    cache = names.get_algorithm_selector_cache()
    aten = names.ExternKernelCaller.__new__(names.ExternKernelCaller)
    aten.name = "mm"
    asked = []

    def do_autotuning(name, input_nodes, choices, precompile_fn=None):
        asked.append(name)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cache, "do_autotuning", do_autotuning)
    on = [True]
    private.around_autotuning(lambda: on[0], lambda timings: timings)
    assert list(cache.do_autotuning("mm", [], [object(), aten])) == [aten] and len(asked) == 2
    with pytest.raises(torch.OutOfMemoryError):  # no ATen among the choices
        cache.do_autotuning("mm", [], [object()])
    on[0] = False
    with pytest.raises(torch.OutOfMemoryError):
        cache.do_autotuning("mm", [], [aten])
    assert len(asked) == 4


def test_while_a_graph_is_captured_nothing_is_measured(monkeypatch, log):
    from tests.plugin.conftest import compile_with, ours_ran, run_and_get_code

    monkeypatch.setattr(devices, "capturing", lambda: True)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    result, code = run_and_get_code(compile_with(lambda a, b: torch.relu(a @ b)), a, b)
    assert not ours_ran(code) and torch.allclose(result, torch.relu(a @ b), atol=1e-4)
    assert "being captured" in log.text


def test_explain_speaks_of_sm_90a():
    from click.testing import CliRunner

    from inductor_plugin.cli import main

    asked = ["explain", "addmm+gelu", "--m", "64", "--n", "4096", "--k", "4096", "--dtype", "bf16", "--target", "sm90a"]
    said = CliRunner().invoke(main, asked).output
    assert "on sm90a" in said and "eligible" in said and "no sm90a device here" in said
    said = CliRunner().invoke(main, [*asked[:-3], "f32", *asked[-2:]]).output
    assert "not eligible: dtype is f32; the sm90a kernel multiplies bf16 and f16" in " ".join(said.split())


class Benchmarker:
    """Stands for Inductor's."""

    def benchmark_gpu(self, _callable, rep=40, return_mode="min", is_vetted_benchmarking=False, warmup=25):
        return "as Inductor does"


def test_where_a_graph_asks_inductor_s_times_of_a_gpu_are_taken_as_ours(monkeypatch):
    names = private.load().names
    assert {"_callable", "is_vetted_benchmarking"} <= set(
        inspect.signature(type(names.benchmarker).benchmark_gpu).parameters
    )
    on, own = [True], "as Inductor does"
    kind = type("Own", (Benchmarker,), {})
    monkeypatch.setattr(names, "benchmarker", kind())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):  # hooks are installed each time that somebody enables the plugin
        private.around_gpu_benchmarks(lambda: on[0], lambda run: run() / 2)
    measured = lambda **wishes: names.benchmarker.benchmark_gpu(lambda: 4.0, **wishes)
    assert measured() == measured(rep=40, warmup=25, is_vetted_benchmarking=True) == 2.0
    assert measured(return_mode="all") == own  # more than a number
    with names.config.patch(deterministic=True):
        assert measured() == own
    on[0] = False
    assert measured() == own
    on[0] = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU of another kind
    assert measured() == own


def test_whose_times_those_are():
    from tests.plugin.conftest import compile_with

    seen = []

    def look(given):
        seen.append(install.times_gpus())
        return given

    a, b = torch.randn(24, 32), torch.randn(32, 40)
    hooks = private.load().names.get_algorithm_selector_cache().preprocessing_fns
    hooks.append(look)
    before = dict(install._state)
    try:
        install._state["asked"] = False
        torch.compile(lambda a, b: a @ b, options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"})(a, b)
        assert not install.times_gpus() and not any(seen)
        seen.clear()
        compile_with(lambda a, b: a @ b + 1)(a, b)
        assert install.times_gpus()  # its first calls, too
        install._state["off"] = True
        assert not install.times_gpus()
    finally:
        install._state.update(before)
        hooks.remove(look)
    assert seen and all(seen)
