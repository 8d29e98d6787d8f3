"""What the plugin takes for granted of TorchInductor's private names. Fails by name when a torch release moves one.

test_private_ahead.py has those of warmups."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

from inductor_plugin import private

# Documented for users, whatever their names look like.
PUBLIC = {"torch._check", "torch._grouped_mm", "torch._scaled_mm"}


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
        if file.name in ("private.py", "private_ahead.py", "__init__.py"):  # __init__ waits for one module's import
            continue
        named = set(re.findall(r"torch\._[a-zA-Z_]+", file.read_text())) - PUBLIC
        assert not named, f"{file.name} names {', '.join(named)}"


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


def test_times_are_kept_by_operation_inputs_precision_and_candidate(names):
    """What is forgotten of rounds that failed. (That Inductor measures again then: test_bad_input.)"""
    cache = names.get_algorithm_selector_cache()
    times = {"mm": {"inputs": {"highest": {"a": 1.0, "b": math.inf}, "high": {"a": math.inf, "b": math.inf}}}}
    cache.update_local_cache(times)
    private._forget_failed_rounds(cache)
    assert cache.get_local_cache() == {"mm": {"inputs": {"highest": {"a": 1.0, "b": math.inf}}}}
    assert issubclass(names.NoValidChoicesError, Exception)


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
    import pickle

    from inductor_plugin.fingerprint import fingerprint

    written = pickle.dumps(factory)
    assert fingerprint().encode() in written
    assert pickle.loads(written)().uuid() == uuid


def test_frozen_graphs_are_saved_by_a_function_that_is_given_them(names):
    import dataclasses

    from torch._inductor.output_code import CompiledFxGraph

    assert list(inspect.signature(names.FxGraphCache._save_graph).parameters)[:2] == ["key", "compiled_graph"]
    assert {"frozen_param_names", "constants"} <= {f.name for f in dataclasses.fields(CompiledFxGraph)}


def test_graphs_of_another_plugin_are_not_taken(monkeypatch):
    """What it fuses and how it calls kernels is in generated code, whatever the templates are."""
    from inductor_plugin import fingerprint as module

    before = module.fingerprint()
    monkeypatch.setattr(module, "of_the_plugin", lambda: "0" * 64)
    assert module.fingerprint() != before


def test_register_lowering_and_lowerings_are_one_table(names):
    from inductor_plugin import fusion

    fusion._register()
    assert torch.ops.flykernels.fused_gemm.default in names.lowerings
    assert torch.ops.aten.permute.default in names.lowerings and torch.ops.aten.view.default in names.lowerings


def test_post_grad_passes_are_ours_and_call_the_original(names):
    assert names.compile_fx.post_grad_passes.__wrapped__ is names.post_grad_passes


def test_grouped_mm_is_an_autotuning_call_with_atens_candidate(names):
    """F.grouped_mm lowers to a choice between candidates; ATen's has the operands, and offs where there are any."""
    seen = []
    hooks = names.get_algorithm_selector_cache().preprocessing_fns
    hooks.insert(0, look := lambda choices: seen.append(choices) or choices)
    try:
        x, w, offs = torch.randn(6, 8).bfloat16(), torch.randn(2, 8, 16).bfloat16(), torch.tensor([2, 6]).int()
        options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
        function = torch.compile(lambda *x: torch._grouped_mm(*x), options=options)
        function(x, w, offs)
        function(w, w.transpose(-2, -1))
    finally:
        hooks.remove(look)
    for choices, count in zip(seen, (3, 2), strict=True):
        aten = next(c for c in choices if isinstance(c, names.ExternKernelCaller))
        assert aten.name == "_grouped_mm" and len(aten.input_nodes) == count
        assert aten.layout.stride[-1] == 1 and not aten.kwargs.get("out_dtype")
        assert [type(x.get_size()) for x in aten.input_nodes]
    assert not seen[0][0].has_out_variant  # so ATen's result is copied where one is given


# -- torch's dispatcher, for eager operators
def test_the_fused_operators_are_what_rms_norm_ends_in():
    forward, backward = torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default
    assert str(forward._schema) == (
        "aten::_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
    )
    assert str(backward._schema) == (
        "aten::_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, "
        "Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)"
    )
    seen = []
    original = private.kernel_of("aten::_fused_rms_norm", "CPU")
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_fused_rms_norm", lambda keys, *a: seen.append(a) or original(keys, *a), "CPU", with_keyset=True)
        x = torch.randn(3, 4)
        with torch.inference_mode():
            y = torch.nn.functional.rms_norm(x, (4,))
        assert len(seen) == 1
        assert type(torch.nn.functional.rms_norm(x.requires_grad_(), (4,)).grad_fn).__name__ == "FusedRmsNormBackward0"
    finally:
        library._destroy()
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (4,)), y)
    assert type(torch.nn.functional.rms_norm(x, (4,)).grad_fn).__name__ != "FusedRmsNormBackward0"


def test_topks_schemas():
    assert str(torch.ops.aten.topk.default._schema) == (
        "aten::topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> "
        "(Tensor values, Tensor indices)"
    )
    assert str(torch.ops.aten.topk.values._schema).startswith(
        "aten::topk.values(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True, *, "
        "Tensor(a!) values, Tensor(b!) indices)"
    )


def test_names_of_eager_operators():
    eager = private.eager()
    assert eager.dispatch_modes() == 0 and eager.functorch_level() is None
    assert eager.forward_ad._current_level == eager.forward_ad_level == -1
    with torch.autograd.forward_ad.dual_level():
        assert eager.forward_ad._current_level == 0
    assert torch.func.vmap(lambda x: x + (eager.functorch_level() is not None))(torch.zeros(2)).tolist() == [1, 1]
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        assert eager.dispatch_modes() == 1
    made = eager.empty_strided_cpu((2, 3), (3, 1), torch.float16)
    assert made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype == torch.float16
    with torch.inference_mode():
        assert eager.empty_strided_cpu((1,), (1,), torch.float32).is_inference()
    assert private.kernel_of("aten::_fused_rms_norm_backward", "SparseCPU") is None
    values, _ = private.kernel_of("aten::topk", "CPU")(
        eager.DispatchKeySet(eager.DispatchKey.CPU), torch.arange(3.0), 1, -1, True, True
    )
    assert values.tolist() == [2]


def test_the_door_of_topk():
    """PyTorch's C interface, the two C++ functions beside it, and the numbers of types."""
    from flykernels.launch import torch_door
    from flykernels.launch.torch_library import libtorch

    library = libtorch()
    numbers = {
        "float32": torch_door.F32,
        "float16": torch_door.F16,
        "bfloat16": torch_door.BF16,
        "int64": torch_door.I64,
    }
    for name, number in numbers.items():
        assert getattr(library, f"aoti_torch_dtype_{name}")() == number
    assert library.aoti_torch_device_type_cpu() == torch_door.CPU


def test_the_second_scaled_product_takes_what_its_meta_function_is_read_for():
    """Where this torch has it: order of arguments, and the number that stands for one scale for 32 along K."""
    from inductor_plugin import scaled

    packet = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    if packet is None:
        assert not hasattr(torch.nn.functional, "scaled_mm")
        return
    given = [a.name for a in packet.default._schema.arguments]
    assert [n.removeprefix("scale_") for n in given[2:8]] == [
        "a", "recipe_a", "swizzle_a", "b", "recipe_b", "swizzle_b",
    ]  # fmt: skip
    assert given[8] == "bias" and given[9] in ("out_dtype", "output_dtype")
    assert torch.nn.functional.ScalingType.BlockWise1x32.value == scaled.BLOCKWISE_1X32
    assert torch.nn.functional.SwizzleType.NO_SWIZZLE.value == 0


def test_scaled_grouped_products_are_lowered_as_the_plugin_reads_them(names):
    """Inductor's lowering of the first version, the arguments of both, what it calls ATen for, and that tracing of the
    second one is ours only where torch has none."""
    from inductor_plugin import lower_scaled_grouped as lower

    first = torch.ops.aten._scaled_grouped_mm.default
    wanted = ["self", "mat2", "scale_a", "scale_b", "offs", "bias", "scale_result", "out_dtype", "use_fast_accum"]
    assert [a.name for a in first._schema.arguments] == wanted
    assert callable(names.fallback_handler) and callable(names.graph.fallback_node_due_to_unsupported_type)
    private.teach_scaled_grouped()
    assert names.lowerings[first].of_flykernels
    packet = getattr(torch.ops.aten, "_scaled_grouped_mm_v2", None)
    if packet is None:
        assert not hasattr(torch.nn.functional, "scaled_grouped_mm")
        return
    given = [a.name for a in packet.default._schema.arguments]
    read = list(inspect.signature(lower.as_first).parameters)
    assert given == ["self", "mat2", *read]
    assert packet.default in names.lowerings
    kinds, where = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    assert (kinds.RowWise.value, kinds.BlockWise1x32.value) == (lower.BY_ROW, lower.BLOCKWISE_1X32)
    assert (where.NO_SWIZZLE.value, where.SWIZZLE_32_4_4.value) == (lower.PLAIN, lower.SWIZZLED)


def test_this_process_takes_the_ptxas_that_helpers_take(monkeypatch):
    from torch._inductor.runtime import compile_tasks

    called = []
    assert parameters(compile_tasks._set_triton_ptxas_path) == set()
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: called.append("set"))
    private.same_ptxas_as_helpers()
    assert called == ["set"]
    monkeypatch.delattr(compile_tasks, "_set_triton_ptxas_path")  # a torch that sees to it elsewhere
    private.same_ptxas_as_helpers()
