"""mxfp8_grouped_linear, forward and backward, by the code objects that an MI350 would run, on the simulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flykernels.sim import run_on_sim
from inductor_plugin import devices, eager_code, ops

from .test_grouped_linear import grouped, layer, of_quantised

SIZES = (40, 0, 1, 33)


@pytest.fixture
def simulated(monkeypatch):
    """CPU tensors are taken for ones of a gfx950 device: what is launched runs on the simulator. Entries launched."""
    memory, launched = {}, []
    address_of, codes_for = torch.Tensor.data_ptr, eager_code.codes_for

    def data_ptr(x: torch.Tensor) -> int:
        at, storage = address_of(x), x.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        memory[at] = whole[at - storage.data_ptr() :]
        return at

    def few_workgroups(template, p, config, target):
        return codes_for(template, p, config | ({"workgroups": 2} if "workgroups" in config else {}), target)

    def launcher(codes):
        (code,) = codes
        assert code.target == "gfx950" and not code.spills

        def launch(*arguments: int) -> None:
            launched.append(code.source["template"])
            grid = code.grid_for(dict(zip((a.name for a in code.arguments), arguments, strict=False)))
            args = [memory[x] if x in memory else np.int64(x) for x in arguments]
            args += [np.zeros(code.workspace_for({}) // 4, np.int32)] if code.workspace else []
            run_on_sim(code, args, (*grid, 1, 1)[:3]).raise_for_findings()

        return launch

    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    monkeypatch.setattr(devices, "kind_of", lambda device: "hip")
    monkeypatch.setattr(eager_code, "codes_for", few_workgroups)
    monkeypatch.setattr(eager_code, "launcher", launcher)
    return launched


def test_layer_and_gradients(tmp_path, monkeypatch, request):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    x, w, offs = layer(SIZES, k=128, n=64, more=2)
    dy = torch.randn(x.shape[0], 64).bfloat16()
    exact = of_quantised(x, w, dy, SIZES, torch.float8_e4m3fn)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    plain = grouped(*wide, SIZES)
    unquantised = (plain, *torch.autograd.grad(plain, wide, dy.double()))
    launched = request.getfixturevalue("simulated")
    y = ops.mxfp8_grouped_linear(x, w, offs)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    assert launched.count("grouped_gemm.scaled") == 3 and launched.count("quantize") >= 4
    for ours, theirs, layer_ in zip(got, exact, unquantised, strict=True):
        assert ((ours.double() - theirs).norm() <= 2e-3 * theirs.norm()).item()
        assert ((ours.double() - layer_).norm() <= 0.055 * layer_.norm()).item()
    assert not y[sum(SIZES) :].any() and not got[1][sum(SIZES) :].any() and not got[2][1].any()
