"""What must never hurt: each case gives ATen's result or ATen's error, one log line that says why, and no crash."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from inductor_plugin import install, kernels, measure, private
from inductor_plugin.counters import counters

from .conftest import assert_close, compile_with, ours_ran, run_and_get_code

pytestmark = pytest.mark.usefixtures("prefer_ours")
mm = lambda a, b: torch.mm(a, b)


def same_as_aten(function, *args):
    """Compiled and eager agree; the generated code."""
    out, code = run_and_get_code(compile_with(function), *args)
    torch.testing.assert_close(out, function(*args), rtol=1e-4, atol=1e-4, equal_nan=True)
    return code


def test_zero_sizes(log):
    for m, n, k in ((0, 4, 5), (4, 0, 5), (4, 5, 0)):
        torch._dynamo.reset()
        a, b = torch.randn(m, k), torch.randn(k, n)
        out = compile_with(mm)(a, b)
        assert out.shape == (m, n) and torch.equal(out, a @ b)
    assert counters["compiles"] == 0


def test_expanded_operands():
    a, b = torch.randn(1, 24).expand(16, 24), torch.randn(24, 1).expand(24, 8)
    same_as_aten(mm, a, b)


def test_overlapping_views():
    base = torch.randn(200)
    same_as_aten(mm, base.as_strided((20, 16), (3, 1)), base.as_strided((16, 8), (5, 2)))


def test_offset_and_misaligned_views():
    base = torch.randn(4000)
    same_as_aten(mm, base[1:].as_strided((20, 16), (17, 1), 7), base[3:].as_strided((16, 8), (8, 1), 1001))
    halves = torch.randn(4000).half()
    same_as_aten(mm, halves[1:321].view(20, 16), halves[3:131].view(16, 8))


def test_aliased_operands():
    x = torch.randn(24, 24)
    same_as_aten(lambda x: torch.mm(x, x), x)
    torch._dynamo.reset()
    same_as_aten(lambda x: torch.mm(x, x.t()), x)
    torch._dynamo.reset()
    same_as_aten(lambda x: torch.mm(x[:12], x[:, 12:]), x)


def test_bmm_of_one_tensor_with_itself_compiled_twice():
    """pytorch#188069: (2, 128, 128), the second compile crashed."""
    x = torch.randn(2, 128, 128)
    for _ in range(2):
        torch._dynamo.reset()
        same_as_aten(lambda x: torch.bmm(x, x), x)


def test_padded_vocabulary():
    """pytorch#125437: rows of 50257 in a stride of 50304, misaligned."""
    w = torch.randn(4, 50304)[:, :50257]
    same_as_aten(lambda x, w: torch.mm(x, w.t()), torch.randn(3, 50257) / 100, w)
    torch._dynamo.reset()
    same_as_aten(mm, torch.randn(5, 4), w)


@pytest.mark.parametrize("width", [4097, 8193, 16385])
def test_widths_one_past_a_power_of_two(width):
    """pytorch#190843."""
    same_as_aten(mm, torch.randn(2, 33), torch.randn(33, width))


def test_spans_over_two_gigabytes():
    """pytorch#191447: rows 2**28 elements apart, of 4 bytes."""
    step = 2**28
    a = torch.empty(step * 2 + 64).as_strided((3, 16), (step, 1))
    a.copy_(torch.randn(3, 16))
    b = torch.randn(16, 8)
    out, code = run_and_get_code(compile_with(mm), a, b)
    assert ours_ran(code)
    assert_close(out, a.double() @ b.double(), 16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64, torch.float64], ids=str)
def test_other_dtypes(dtype, log):
    a, b = torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
    out, code = run_and_get_code(compile_with(mm), a, b)
    assert not ours_ran(code) and torch.equal(out, a @ b)


def test_errors_are_atens():
    for a, b in ((torch.randn(3, 4), torch.randn(5, 6)), (torch.randn(3, 4), torch.randn(4, 6).half())):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError):
            torch.mm(a, b)
        with pytest.raises(RuntimeError):
            compile_with(mm)(a, b)


def test_nan_and_infinity_pass_through():
    a, b = torch.randn(9, 20), torch.randn(20, 17)
    a[1, 3], a[4, 5], b[7, 2], a[8, 0] = float("nan"), float("inf"), float("-inf"), float("inf")
    same_as_aten(mm, a, b)
    torch._dynamo.reset()
    same_as_aten(lambda a, b: torch.relu(a @ b), a, b)


def test_a_template_that_raises_while_compiling(monkeypatch, log):
    from templates.gemm import build

    def broken(*_):
        raise ZeroDivisionError("a template's bug")

    monkeypatch.setattr(build, "build_from_json", broken)
    code = same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8))
    assert not ours_ran(code) and "ZeroDivisionError: a template's bug" in log.text
    log.clear()
    torch._dynamo.reset()
    torch._inductor.utils.clear_caches()
    same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8))  # ATen won, and that is remembered
    assert "ZeroDivisionError" not in log.text


def test_a_search_space_that_raises(monkeypatch, log):
    from templates.gemm import space

    monkeypatch.setattr(space, "candidates", lambda *_: 1 / 0)
    assert not ours_ran(same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8)))
    assert "no candidates offered: ZeroDivisionError" in log.text


def test_a_candidate_that_is_wrong_never_wins(monkeypatch, log):
    """A kernel that forgets the last column of C, although Inductor is told that it is fast."""
    original = kernels.callable_for

    def forgetful(spec):
        run = original(spec)

        def call(*operands, out):
            run(*operands, out=out)
            out[..., -1] += 1
            return out

        return call

    monkeypatch.setattr(kernels, "callable_for", forgetful)
    code = same_as_aten(mm, torch.randn(32, 16), torch.randn(16, 24))
    assert not ours_ran(code) and "quarantined: Wrong" in log.text
    from inductor_plugin import settings
    from tuning_cache import Entry

    (path,) = settings.store().directories[0].glob("entries/*/*.json")
    entry = Entry.from_json(path.read_text())
    assert entry.winner == "aten mm"
    assert all("inputs" in t.quarantined for t in entry.timings.values() if t.config)


def test_a_candidate_that_leaves_part_of_the_result_unwritten_never_wins(monkeypatch, log):
    original = kernels.callable_for
    partial = lambda spec: lambda *o, out: original(spec)(*o, out=torch.empty_like(out)) or out
    monkeypatch.setattr(kernels, "callable_for", partial)
    assert not ours_ran(same_as_aten(mm, torch.randn(32, 16), torch.randn(16, 24)))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_running_out_of_memory_while_measuring(monkeypatch, error):
    """pytorch#190837: fatal there."""

    def full(*_, **__):
        raise error

    monkeypatch.setattr(measure._Request, "_measure", full)
    assert not ours_ran(same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8)))


@pytest.mark.parametrize("failures", [1, 2])
def test_every_candidate_failing_while_it_is_measured(monkeypatch, log, failures):
    """Inductor has an error for that, ATen's call none: tried again, then ATen's. (As when a GPU is almost full.)"""
    cache, rounds = type(private.load().names.get_algorithm_selector_cache()), []
    measure_all, measure_one = cache.benchmark_choices.__func__, cache.benchmark_choice.__func__

    def benchmark_choices(cls, *args, **kwargs):
        rounds.append(len(rounds) + 1)
        return measure_all(cls, *args, **kwargs)

    def benchmark_choice(cls, *args):
        if rounds[-1] <= failures:
            raise RuntimeError("CUDA out of memory")
        return measure_one(cls, *args)

    monkeypatch.setattr(cache, "benchmark_choices", classmethod(benchmark_choices))
    monkeypatch.setattr(cache, "benchmark_choice", classmethod(benchmark_choice))
    code = same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8))
    assert len(rounds) == 2 and ours_ran(code) == (failures == 1)
    assert ("ATen serves it" in log.text) == (failures == 2) and "every candidate failed" in log.text


def test_an_unwritable_cache_directory(tmp_path, monkeypatch, log):
    blocked = tmp_path / "in the way"
    blocked.write_text("a file")
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(blocked))
    assert ours_ran(same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8)))


def test_a_cache_entry_cut_in_half_is_measured_again(own_caches):
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    same_as_aten(mm, a, b)
    (path,) = (own_caches / "flykernels").glob("entries/*/*.json")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _forget(own_caches)
    before = counters["benchmarks"]
    same_as_aten(mm, a, b)
    assert counters["benchmarks"] > before


def test_a_lost_code_object_is_built_again(own_caches):
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    same_as_aten(mm, a, b)
    for path in (own_caches / "flykernels").glob("objects/*/*.fko"):
        path.unlink()
    _forget(own_caches)
    before = counters["compiles"]
    assert ours_ran(same_as_aten(mm, a, b)) and counters["compiles"] == before + 1


def test_a_kernel_that_cannot_be_had_at_run_time_is_atens(own_caches, monkeypatch, log):
    """Generated code from Inductor's cache, but neither a code object nor a compiler."""
    spec = kernels.Spec("mm", "x86", kernels.GemmProblem(n=4, k=4), {"columns": 8}, "0" * 64)

    def nothing(*_):
        raise ImportError("no MLIR here")

    monkeypatch.setattr("templates.gemm.build.build_from_json", nothing)
    call = kernels.bind(spec.to_json())
    a, b, out = torch.randn(3, 4), torch.randn(4, 4), torch.empty(3, 4)
    assert call(a, b, out=out) is out and torch.equal(out, a @ b)
    assert log.text.count("ATen serves it") == 1


def test_operands_laid_out_otherwise_than_compiled_for_go_to_aten(own_caches, log):
    """What Inductor's own guards should make impossible."""
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    _, code = run_and_get_code(compile_with(mm), a, b)
    text = next(line for line in code.splitlines() if "flykernels_bind('" in line).split("flykernels_bind(")[1][:-1]
    import ast

    call, out = kernels.bind(ast.literal_eval(text)), torch.empty(6, 4)
    assert torch.equal(call(a, b, out=out), a @ b) or torch.allclose(out, a @ b)
    for other in (a.t().contiguous().t(), torch.randn(6, 16)[:, ::2], torch.randn(6, 9)):
        if other.shape == a.shape:
            torch.testing.assert_close(call(other, b, out=out), other @ b)
        else:
            with pytest.raises(RuntimeError):
                call(other, b, out=out)
        assert log.text.count("ATen serves this call") == 1  # it is said once


def test_cpp_wrapper_stands_aside(log):
    with torch._inductor.config.patch(cpp_wrapper=True):
        out = compile_with(mm)(torch.ones(8, 8), torch.ones(8, 8))
    assert (out == 8).all() and "cpp_wrapper" in log.text


def test_pinned_and_pinned_strict(monkeypatch, log):
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError

    a, b = torch.randn(8, 8), torch.randn(8, 8)
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    assert not ours_ran(same_as_aten(mm, a, b))
    assert counters["benchmarks"] == 0 and "not in the pinned cache" in log.text
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned-strict")
    torch._dynamo.reset()
    torch._inductor.utils.clear_caches()
    with pytest.raises((BackendCompilerFailed, InductorError), match="not in the pinned cache"):
        compile_with(mm)(torch.randn(9, 8), b)
    monkeypatch.setenv("FLYKERNELS_MODE", "tune")
    torch._dynamo.reset()
    assert ours_ran(same_as_aten(mm, a, b))
    before = counters["benchmarks"]
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned-strict")
    torch._dynamo.reset()
    torch._inductor.utils.clear_caches()
    assert ours_ran(same_as_aten(mm, a, b)) and counters["benchmarks"] == before


def test_disabled_and_not_asked_for(seen):
    import inductor_plugin

    a, b = torch.randn(8, 8), torch.randn(8, 8)
    _, code = run_and_get_code(
        torch.compile(mm, options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}), a, b
    )
    assert not ours_ran(code)
    inductor_plugin.disable()
    torch._dynamo.reset()
    _, code = run_and_get_code(compile_with(mm), a, b)
    assert not ours_ran(code)
    assert inductor_plugin.enable() and install.TOKEN in torch._inductor.config.max_autotune_gemm_backends


def test_another_users_clear_of_the_hooks_is_survived():
    from torch._inductor.select_algorithm import clear_preprocessing_fns

    import inductor_plugin

    clear_preprocessing_fns(clear_defaults=False)
    inductor_plugin.enable()
    assert ours_ran(same_as_aten(mm, torch.randn(8, 8), torch.randn(8, 8)))


def _forget(folder):
    """As a new process would: nothing in memory, and Inductor's own caches gone."""
    import shutil

    from inductor_plugin import settings

    settings._store.cache_clear()
    kernels._built.clear()
    torch._dynamo.reset()
    torch._inductor.utils.clear_caches()
    shutil.rmtree(folder / "inductor", ignore_errors=True)
    os.makedirs(folder / "inductor", exist_ok=True)
