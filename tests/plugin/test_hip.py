"""HIP devices as the plugin sees them, and calls that reach a recording library in the place of HIP."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flykernels.codeobject import Argument, CodeObject, Extent
from flykernels.launch import hip
from inductor_plugin import bind_hip, devices, kernels, requests
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem
from tests.launch.recorder import RecordingHip


@pytest.fixture
def mi350(monkeypatch):
    """A torch that says it is built for HIP and has one MI350X."""
    found = SimpleNamespace(
        gcnArchName="gfx950:sramecc+:xnack-", name="AMD Instinct MI350X", multi_processor_count=256, major=9, minor=5
    )
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0x77))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    return found


def test_an_mi350_is_described_and_another_gpu_is_not_eligible(mi350, monkeypatch):
    device = devices.device_for(torch.device("cuda", 0))
    assert device.target == "gfx950"
    assert device.description() == {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256}
    assert devices.here("gfx950") is device and devices.here("x86") is devices.DEVICES["cpu"]
    mi350.gcnArchName = "gfx942:sramecc+"
    with pytest.raises(requests.NotEligible):
        devices.device_for(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(requests.NotEligible):
        devices.device_for(torch.device("cuda", 0))
    assert devices.here("gfx950") is None


def made(p: GemmProblem, split: bool = False) -> CodeObject:
    pointer = lambda n: Argument(n, "pointer", "bf16")
    listed = [pointer(n) for n in arguments.pointers(p)] + [Argument(n, "i64", "i64") for n in arguments.scalars(p)]
    workspace = (Extent("m", 64), Extent(1024)) if split else ()
    listed += [pointer("workspace")] if split else []
    grid = ((Extent("m", 64), Extent(p.n, 64)),)
    return CodeObject("gfx950", "gfx950", "gemm", tuple(listed), grid, 256, workspace=workspace, binary=b"binary")


def bound(p: GemmProblem, monkeypatch, split: bool = False):
    code = made(p, split)
    library = RecordingHip(code)
    monkeypatch.setattr(hip, "runtime", lambda: hip.Hip(library))
    spec = kernels.Spec("mm", "gfx950", p, {"tile_m": 64})
    return bind_hip.bind(code, spec), library


def test_a_call_launches_on_the_current_stream(mi350, monkeypatch):
    p = GemmProblem(64, 32, "bf16", "bf16", "row", "col")
    call, library = bound(p, monkeypatch)
    a, w, out = (torch.zeros(s, dtype=torch.bfloat16) for s in ((100, 32), (64, 32), (100, 64)))
    assert call(a, w.t(), out=out) is out
    pointers = [a.data_ptr(), w.data_ptr(), out.data_ptr()]
    launched = [(0x2000, (2, 1, 1), (256, 1, 1), 0, 0x77, [*pointers, 100, 32, 32, 64], False)]
    assert library.named("hipModuleLaunchKernel") == launched
    call(a, w.t(), out=out)
    assert len(library.named("hipModuleLoadData")) == 1 and len(library.named("hipModuleLaunchKernel")) == 2


def test_workspace_is_zeros_once_and_kept_for_the_stream(mi350, monkeypatch):
    p = GemmProblem(64, 32, "bf16", "bf16", "row", "col")
    call, library = bound(p, monkeypatch, split=True)
    tensors = lambda m: [torch.empty(s, dtype=torch.bfloat16) for s in ((m, 32), (64, 32), (m, 64))]
    for m in (100, 64, 130):
        a, w, out = tensors(m)
        call(a, w.t(), out=out)
    assert [size for size, _ in library.named("allocate")] == [2048, 4096]
    spaces = [values[-1] for *_, values, _ in library.named("hipModuleLaunchKernel")]
    assert spaces[0] == spaces[1] != spaces[2]


@pytest.mark.parametrize("what", ["offset", "stride", "layout", "span"])
def test_operands_that_the_kernel_was_not_built_for_go_to_aten(mi350, monkeypatch, what):
    p = GemmProblem(64, 32, "bf16", "bf16", "row", "col")
    call, library = bound(p, monkeypatch)
    a, w, out = (torch.randn(s, dtype=torch.bfloat16) for s in ((4, 32), (64, 32), (4, 64)))
    if what == "offset":
        a = torch.randn(4 * 32 + 1, dtype=torch.bfloat16)[1:].view(4, 32)
    elif what == "stride":
        a = torch.randn(4, 33, dtype=torch.bfloat16)[:, :32]
    elif what == "span":
        a = torch.randn(32, dtype=torch.bfloat16).as_strided((1, 32), (2**24, 1))
        out = out[:1]
    else:
        a = a[:, ::2].contiguous().repeat(1, 2)[:, :32].t().contiguous().t()
    call(a, w.t(), out=out)
    assert not library.named("hipModuleLaunchKernel")
    assert torch.allclose(out.float(), a.float() @ w.t().float(), atol=0.3)


def test_alignment_is_what_strides_and_offsets_allow():
    layout = lambda size, stride, offset=0: SimpleNamespace(
        size=size, stride=stride, offset=offset, dtype=torch.bfloat16
    )
    whole, odd = layout((8, 64), (64, 1)), layout((8, 63), (63, 1))
    assert requests.alignments(whole, odd, [whole, layout((8, 64), (64, 1), 4)]) == {
        "align_a": 16,
        "align_b": 2,
        "align_c": 8,
    }
    assert requests.alignments(layout((1, 63), (63, 1)), whole, [whole])["align_a"] == 16


def test_kernels_for_gfx950_are_built_in_processes_and_stored(tmp_path, monkeypatch):
    from inductor_plugin import settings

    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path))
    config = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 3, "waves": [2, 2]}
    spec = kernels.Spec("mm", "gfx950", GemmProblem(64, 128, "bf16", "bf16", "row", "col"), config)
    code = kernels.code_for(spec)
    assert code.target == "gfx950" and code.spills == 0 and code.workgroup_size == 256
    digest = settings.store().add(code)
    assert settings.store().load(digest) == code
