"""What the plugin takes for granted of TorchInductor's private names. Fails by name when a torch release moves one."""

from __future__ import annotations

import inspect

import pytest
import torch

from inductor_plugin import private


@pytest.fixture(scope="module")
def names():
    loaded = private.load()
    assert loaded.missing == ()
    return loaded.names


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_nothing_else_in_the_plugin_touches_private_names():
    import pathlib

    import inductor_plugin

    folder = pathlib.Path(inductor_plugin.__file__).parent
    for file in folder.glob("*.py"):
        if file.name in ("private.py", "__init__.py"):  # __init__ names one module, to wait for its import
            continue
        text = file.read_text()
        assert "torch._inductor" not in text, file.name
        assert "torch._dynamo" not in text, file.name


def test_a_missing_name_is_reported_and_not_raised(monkeypatch):
    monkeypatch.setitem(private.REQUIRED, "gone", "torch._inductor.select_algorithm:not_there")
    loaded = private.load.__wrapped__()
    assert len(loaded.missing) == 1 and "not_there" in loaded.missing[0]


def test_with_a_name_missing_enable_says_no_and_compile_still_works(monkeypatch, caplog):
    from inductor_plugin import install

    broken = private.Private(private.load().names, ("torch._inductor:gone (AttributeError)",))
    monkeypatch.setattr(private, "load", lambda: broken)
    install._hook.cache_clear()
    try:
        assert install.enable() is False
        assert "stays off" in caplog.text
    finally:
        install._hook.cache_clear()


def test_the_selector_cache_has_the_hook_list_and_feeds_savers(names):
    cache = names.get_algorithm_selector_cache()
    assert isinstance(cache.preprocessing_fns, list) and isinstance(cache.feedback_saver_fns, list)


def test_constructors_take_what_we_give(names):
    assert {"layout", "inputs", "kwargs", "python_kernel_name"} <= parameters(names.ExternKernelOut.__init__)
    assert {"name", "input_nodes", "layout", "description"} <= parameters(names.ChoiceCaller.__init__)
    request = parameters(names.BenchmarkRequest.__init__)
    assert {"kernel_name", "input_tensor_meta", "output_tensor_meta", "extra_args"} <= request
    assert {"fn"} <= parameters(names.CPUDeviceBenchmarkMixin.do_bench)
    assert {"layout"} <= parameters(names.mm_args)
    fields = set(names.TensorMeta.__dataclass_fields__)
    assert {"device", "dtype", "sizes", "strides", "offset"} <= fields and hasattr(names.TensorMeta, "to_tensor")


def test_the_choices_factory_enters_the_cache_key(names):
    factory = names.config.inductor_choices_class
    uuid = factory().uuid()
    assert "flykernels-" in str(uuid)


def test_register_lowering_and_lowerings_are_one_table(names):
    from inductor_plugin import fusion

    fusion._register()
    assert torch.ops.flykernels.fused_gemm.default in names.lowerings
    assert torch.ops.aten.permute.default in names.lowerings and torch.ops.aten.view.default in names.lowerings


def test_post_grad_passes_are_ours_and_call_the_original(names):
    assert names.compile_fx.post_grad_passes.__wrapped__ is names.post_grad_passes
