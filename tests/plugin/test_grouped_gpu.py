"""Grouped products on GPUs that are not here: what a call launches, what goes to ATen, with recording libraries."""

from __future__ import annotations

import pytest
import torch

from flykernels.codeobject import Argument, CodeObject, Extent
from flykernels.launch import cuda, hip
from inductor_plugin import devices, grouped, kernels
from templates.grouped_gemm.arguments import pointers, problem_of, scalars
from templates.grouped_gemm.problem import GroupedGemmProblem
from tests.launch.recorder import RecordingCuda, RecordingHip

from .test_cuda import h200  # noqa: F401  # fixtures
from .test_hip import mi350  # noqa: F401

BF16 = torch.bfloat16


def rand(*size: int) -> torch.Tensor:
    return torch.randn(size).to(BF16)


def operands():
    offs = torch.tensor([3, 3, 20], dtype=torch.int32)
    return rand(24, 64), rand(3, 48, 64).transpose(-2, -1), offs, torch.zeros(24, 48, dtype=BF16)


def bound(monkeypatch, target: str, p: GroupedGemmProblem):
    pointer = lambda n: Argument(n, "pointer", "i32" if n == "offs" else "bf16")
    listed = [pointer(n) for n in pointers(p)] + [Argument(n, "i64", "i64") for n in scalars(p)]
    features = {"sm90a": "sm_90a", "gfx950": "gfx950"}[target]
    code = CodeObject(
        target, features, "grouped_gemm", tuple(listed), ((Extent("tokens", 64), Extent(2)),), 256, binary=b"binary"
    )
    if target == "sm90a":
        library = RecordingCuda(code)
        monkeypatch.setattr(cuda, "runtime", lambda: cuda.Cuda(library))
    else:
        library = RecordingHip(code)
        monkeypatch.setattr(hip, "runtime", lambda: hip.Hip(library))
    return grouped.bind(code, kernels.Spec(grouped.OP, target, p, {"tile": 1})), library


def launched(library) -> list[list]:
    """Arguments of every launch."""
    of_cuda = isinstance(library, RecordingCuda)
    return [x[5] for x in library.named("cuLaunchKernelEx" if of_cuda else "hipModuleLaunchKernel")]


@pytest.mark.parametrize("target, gpu", [("sm90a", "h200"), ("gfx950", "mi350")])
def test_a_call_launches_with_offs_where_they_lie(target, gpu, monkeypatch, request):
    request.getfixturevalue(gpu)
    a, b, offs, out = operands()
    p = problem_of(a, b, offs)
    call, library = bound(monkeypatch, target, p)
    assert call(a, b, offs, out=out) is out
    addresses = [x.data_ptr() for x in (a, b, offs, out)]
    assert launched(library) == [[*addresses, 24, 64, 64, 48, 48 * 64]]


@pytest.mark.parametrize("what", ["offset", "stride", "layout", "repeated rows", "other K", "offs apart"])
@pytest.mark.parametrize("target, gpu", [("sm90a", "h200"), ("gfx950", "mi350")])
def test_operands_that_the_kernel_was_not_built_for_go_to_aten(what, target, gpu, monkeypatch, request):
    request.getfixturevalue(gpu)
    a, b, offs, out = operands()
    call, library = bound(monkeypatch, target, problem_of(a, b, offs))
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: torch.ones(a.shape[0], b.shape[-1], dtype=BF16))
    if what == "offset":
        a = rand(24 * 64 + 1)[1:].view(24, 64)
    elif what == "stride":
        a = rand(24, 65)[:, :64]
    elif what == "layout":
        b = b.contiguous()
    elif what == "repeated rows":
        a = rand(1, 64).expand(24, 64)
    elif what == "other K":
        a, b = rand(24, 32), rand(3, 48, 32).transpose(-2, -1)
    else:
        offs = torch.tensor([3, 0, 3, 0, 20, 0], dtype=torch.int32)[::2]
    assert call(a, b, offs, out=out).eq(1).all() and not launched(library)


def test_repeated_weights_are_one_matrix(h200, monkeypatch):  # noqa: F811
    a, b, offs, out = operands()
    call, library = bound(monkeypatch, "sm90a", problem_of(a, b, offs))
    call(a, b[:1].expand(3, 64, 48), offs, out=out)
    assert launched(library)[0][-1] == 0


def test_without_tokens_nothing_is_launched(h200, monkeypatch):  # noqa: F811
    a, b, offs, out = operands()
    call, library = bound(monkeypatch, "sm90a", problem_of(a, b, offs))
    assert call(a[:0], b, offs * 0, out=out[:0]).shape == (0, 48)
    p = problem_of(rand(24, 64).t(), rand(24, 48), offs)
    call, library = bound(monkeypatch, "sm90a", p)
    gradient = torch.full((3, 64, 48), float("nan"), dtype=BF16)
    assert not call(rand(0, 64).t(), rand(0, 48), offs * 0, out=gradient).any() and not launched(library)


@pytest.mark.parametrize("target", ["sm90a", "gfx950"])
def test_candidates_are_offered_for_both_makers(target):
    a, b, offs, _ = operands()
    device = next(d for d in devices.DEVICES.values() if d.target == target)
    space = device.candidates(problem_of(a, b, offs))
    assert space.kept
    spec = kernels.Spec(grouped.OP, target, problem_of(a, b, offs), space.kept[0].config.key())
    assert kernels.Spec.from_json(spec.to_json()) == spec


def test_kernels_are_built_in_processes_and_stored(tmp_path, monkeypatch):
    from inductor_plugin import settings

    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path))
    a, b, offs, _ = operands()
    config = {"tile_m": 64, "tile_n": 64, "stages": 4, "groups": [1, 1], "persistent": True}
    code = kernels.code_for(kernels.Spec(grouped.OP, "sm90a", problem_of(a, b, offs), config))
    assert code.target == "sm90a" and code.spills == 0 and code.source["template"] == "grouped_gemm"
    assert settings.store().load(settings.store().add(code)) == code
