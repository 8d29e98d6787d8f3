"""What warmups take for granted of torch's private names. Fails by name when a torch release moves one."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

from inductor_plugin import lowering, private, private_ahead, wanted


@pytest.fixture(scope="module")
def names():
    loaded = private_ahead.load()
    assert loaded.missing == ()
    return loaded.names


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_with_a_name_missing_a_warmup_says_so(monkeypatch):
    monkeypatch.setitem(private_ahead.REQUIRED, "gone", "torch._inductor.graph:not_there")
    broken = private_ahead.load.__wrapped__()
    assert len(broken.missing) == 1
    monkeypatch.setattr(private_ahead, "load", lambda: broken)
    program = lowering.Program(lambda: pytest.fail("the model was made"))
    with pytest.raises(lowering.ModelError, match="not_there"):
        lowering.lower(program, "x86", {}, True)


def test_functions_take_what_we_give(names):
    assert {"inner_compile", "config_patches"} <= set(parameters(names.compile_fx))
    assert parameters(names.compile_fx_inner)[:2] == ["gm", "example_inputs"]
    assert parameters(names.compile_to_module) == ["self"]
    assert "allow_non_fake_inputs" in parameters(names.FakeTensorMode)
    assert parameters(names.module_apply)[:3] == ["self", "fn", "recurse"]
    assert parameters(names.mark_dynamic)[:2] == ["t", "index"]
    deferred = private.load().names.MultiTemplateBuffer
    assert deferred is None or parameters(deferred.choice_timings)[0] == "self"


def test_what_is_marked_is_kept(names):
    x = torch.empty(4, 8, requires_grad=True)
    private_ahead.symbolic(x, 0)
    other = private_ahead.kept(x, torch.empty(4, 8))
    assert other._dynamo_dynamic_indices == x._dynamo_dynamic_indices == {0} and other.requires_grad


def test_fake_tensors_are_told_and_left(names):
    assert not private.is_fake(torch.empty(2))
    with private_ahead.fake_tensors() as mode:
        x = torch.empty(1 << 50)
        assert private.is_fake(x) and names.detect_fake_mode([x]) is mode
        with names.unset_fake_temporarily():
            assert not private.is_fake(torch.empty(2))


def test_modules_of_fake_tensors_convert_and_stay_tied():
    with private_ahead.fake_tensors(), private_ahead.converting_modules():
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        second.weight = first.weight
        both = torch.nn.Sequential(first, second).to(torch.bfloat16)
    assert both[0].weight is both[1].weight and {p.dtype for p in both.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("target", private_ahead.PROPERTIES)
def test_a_gpu_that_is_not_here_has_what_inductor_asks(names, target):
    described, device = wanted.description_of(target), torch.device("cuda", 0)
    before = torch.version.hip, torch.cuda.get_device_properties, names.CudaInterface.Worker.current_device
    with private_ahead.gpu_elsewhere(target, described):
        found = names.DeviceProperties.create(device)
        assert found.multi_processor_count == described["compute_units"]
        assert found.warp_size == private_ahead.PROPERTIES[target]["warp_size"]
        assert found.type == ("hip" if target == "gfx950" else "cuda")
        assert names.CudaInterface.is_bf16_supported() and names.CudaInterface.current_device() == 0
        assert names.CudaInterface.Worker.get_device_properties(device).major == 9
    assert (torch.version.hip, torch.cuda.get_device_properties, names.CudaInterface.Worker.current_device) == before


def test_graphs_are_lowered_and_no_further(names):
    """compile_to_module is where lowering is over: it is reached, and no code is generated."""
    failed, lowered = [], []

    def add(x):
        return torch.relu(x @ x) + 1

    def stop(graph):
        lowered.append(len(graph.buffers))
        return kept_stop(graph)

    torch.compiler.reset()
    with private_ahead.lowering_only(), mock.patch.object(names.GraphLowering, "codegen") as code:
        kept_stop = names.GraphLowering.compile_to_module
        with mock.patch.object(names.GraphLowering, "compile_to_module", stop):
            options = {"force_disable_caches": True}
            x = torch.randn(8, 8)
            got = torch.compile(add, backend=private_ahead.backend(False, options, failed.append))(x)
    torch.compiler.reset()
    assert not failed and not code.called and len(lowered) == 1 and lowered[0] > 0
    torch.testing.assert_close(got, add(x))
