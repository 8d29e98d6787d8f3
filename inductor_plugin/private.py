"""Every private name of TorchInductor and of torch's dispatcher that compiled models and operators touch. Those that a
warmup needs besides are in private_ahead.py; nothing else touches any.

`load()` imports them and says which are missing; with one missing the plugin stays off and the user has what they had.
Read in torch 2.11, 2.13, 2.14 and 2.15; `tests/plugin/test_private.py` holds the contract: what each name must accept
and do.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from . import devices

log = logging.getLogger(__name__)

# name here -> "module" or "module:attribute path"
REQUIRED = {
    "config": "torch._inductor.config",
    "ir": "torch._inductor.ir",
    "V": "torch._inductor.virtualized:V",
    "compile_fx": "torch._inductor.compile_fx",
    "lowerings": "torch._inductor.lowering:lowerings",
    "register_lowering": "torch._inductor.lowering:register_lowering",
    "mm_args": "torch._inductor.kernel.mm_common:mm_args",
    "get_algorithm_selector_cache": "torch._inductor.select_algorithm:get_algorithm_selector_cache",
    "add_feedback_saver": "torch._inductor.select_algorithm:add_feedback_saver",
    "ExternKernelCaller": "torch._inductor.select_algorithm:ExternKernelCaller",
    "ChoiceCaller": "torch._inductor.ir:ChoiceCaller",
    "ExternKernelOut": "torch._inductor.ir:ExternKernelOut",
    "FixedLayout": "torch._inductor.ir:FixedLayout",
    "TensorBox": "torch._inductor.ir:TensorBox",
    "BenchmarkRequest": "torch._inductor.autotune_process:BenchmarkRequest",
    "CPUDeviceBenchmarkMixin": "torch._inductor.autotune_process:CPUDeviceBenchmarkMixin",
    "GPUDeviceBenchmarkMixin": "torch._inductor.autotune_process:GPUDeviceBenchmarkMixin",
    "TensorMeta": "torch._inductor.autotune_process:TensorMeta",
    "InductorChoices": "torch._inductor.choices:InductorChoices",
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
}
# Present in some versions only; None where absent.
OPTIONAL = {
    "register_inductor_choices": "torch._inductor.choices:register_inductor_choices",  # 2.15 on
    "post_grad_passes": "torch._inductor.compile_fx:post_grad_passes",
    "MultiTemplateBuffer": "torch._inductor.ir:MultiTemplateBuffer",
    "fallback_handler": "torch._inductor.lowering:fallback_handler",
    "FxGraphCache": "torch._inductor.codecache:FxGraphCache",
    "graph": "torch._inductor.graph",  # its fallback_node_due_to_unsupported_type
    "benchmarker": "torch._inductor.runtime.benchmarking:benchmarker",
    "NoValidChoicesError": "torch._inductor.select_algorithm:NoValidChoicesError",
}

# Of torch itself, for eager operators: nothing of Inductor is imported for these.
EAGER_REQUIRED = {
    "get_kernel": "torch.library:get_kernel",  # the kernel that the dispatcher has, before ours takes its place
    "DispatchKey": "torch._C:DispatchKey",
    "DispatchKeySet": "torch._C:DispatchKeySet",
    "dispatch_modes": "torch._C:_len_torch_dispatch_stack",  # how many TorchDispatchModes look on
    "functorch_level": "torch._C._functorch:peek_interpreter_stack",  # None outside vmap, grad, jvp, ...
    "forward_ad": "torch.autograd.forward_ad",  # its _current_level: -1 outside forward-mode differentiation
    "forward_ad_level": "torch.autograd.forward_ad:_current_level",
    "empty_strided_cpu": "torch._C._dynamo.guards:_empty_strided_cpu",  # what generated code allocates with
    "empty_strided_cuda": "torch._C._dynamo.guards:_empty_strided_cuda",
}


@dataclass(frozen=True)
class Private:
    """`names.X` for each X above; `missing` in words."""

    names: Any
    missing: tuple[str, ...] = field(default=())


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return functools.reduce(getattr, attribute.split(".") if attribute else (), importlib.import_module(module))


def collect(required: dict[str, str], optional: dict[str, str]) -> Private:
    """The names of two tables. Never raises: what is missing is None, and of the required ones told."""
    found, missing = {}, []
    for name, path in {**required, **optional}.items():
        try:
            found[name] = _resolve(path)
        except (ImportError, AttributeError) as e:
            found[name] = None
            if name in required:
                missing.append(f"{path} ({type(e).__name__}: {e})")
    return Private(SimpleNamespace(**found), tuple(missing))


@functools.cache
def load() -> Private:
    """Import Inductor and collect the names. Never raises."""
    found = collect(REQUIRED, OPTIONAL)
    if found.missing or hasattr(found.names.get_algorithm_selector_cache(), "preprocessing_fns"):
        return found
    return Private(found.names, ("torch._inductor.select_algorithm: the selector cache has no preprocessing_fns",))


@functools.cache
def eager() -> Any:
    """The names that eager operators need. AttributeError or ImportError, by name, where this torch lacks one."""
    import torch

    found = SimpleNamespace(**{name: _resolve(path) for name, path in EAGER_REQUIRED.items()})
    found.current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return found


def kernel_of(op: str, key: str) -> Any:
    """The kernel that the dispatcher now calls for an operator ("aten::topk") and key ("CPU"), as a function of (keys,
    *arguments), or None if there is none. keys: what a kernel registered `with_keyset` is given."""
    try:
        return eager().get_kernel(op, key).call_boxed
    except (RuntimeError, ValueError):
        return None


def trace_as_composed(ops: Sequence[str], keys: Sequence[str], on: bool) -> None:
    """Whether tracing (compiling, make_fx) sees what ATen composes these operators of, whatever is registered for the
    keys: a kernel of the C interface would have symbolic sizes turned into numbers."""
    import torch

    for name in ops:
        op = getattr(torch.ops.aten, name).default
        for key in (getattr(torch._C.DispatchKey, key) for key in keys):
            if on:
                op.py_kernels[key] = _composed(op, autograd=key.name.startswith("Autograd"))
            else:
                op.py_kernels.pop(key, None)
            op._dispatch_cache.pop(key, None)


def _composed(op: Any, autograd: bool) -> Any:
    """What tracing runs for an operator on a key. Where torch.export has put something in the place of ATen's
    composition, that is what autograd's key runs; or it says that the operator is to stay whole."""
    import torch
    from torch._higher_order_ops.utils import autograd_not_implemented

    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    whole = autograd_not_implemented(op, deferred_error=True)

    def traced(*args: Any, **named: Any) -> Any:
        if not autograd or composite not in op.py_kernels:
            return op._op_dk(composite, *args, **named)
        found = op.py_kernels[composite](*args, **named)
        return whole(*args, **named) if found is NotImplemented else found

    return traced


# -- what the rest of the plugin asks of Inductor, in its own words


def add_preprocessing(function: Any) -> None:
    """Let `function(choices) -> choices` see every autotuning call's candidates, before Inductor's own filters."""
    hooks = load().names.get_algorithm_selector_cache().preprocessing_fns
    if function not in hooks:
        hooks.insert(0, function)


def remove_preprocessing(function: Any) -> None:
    hooks = load().names.get_algorithm_selector_cache().preprocessing_fns
    while function in hooks:
        hooks.remove(function)


def stands_aside() -> str | None:
    """Why no candidate may be offered in the graph being compiled, or None: ahead-of-time and C++ wrappers call no
    Python, so ATen serves them."""
    graph = load().names.V.graph
    if getattr(graph, "cpp_wrapper", False):
        return "cpp_wrapper is on: a wrapper in C++ cannot call our kernels yet"
    if getattr(graph, "aot_mode", False):
        return "AOTInductor packages hold no Python, so they cannot call our kernels yet"
    return None


def symbolic_hint(expr: Any) -> int:
    """The size that Inductor tunes for, of an expression that may be symbolic."""
    sizevars = load().names.V.graph.sizevars
    for method in ("optimization_hint", "size_hint"):  # renamed in 2.12
        if hasattr(sizevars, method):
            return int(getattr(sizevars, method)(expr))
    raise AttributeError("Inductor's sizevars have neither optimization_hint nor size_hint")


def constant_tensor(node: Any) -> Any:
    """The tensor behind an IR node that is a constant of the graph (a frozen weight), as the node views it; or None."""
    names = load().names
    graph = names.V.graph
    try:
        name = node.get_name()
    except (AttributeError, NotImplementedError):
        return None
    tensor = graph.constants.get(name)
    if tensor is None or getattr(tensor, "is_mkldnn", False) or not hasattr(names.FxGraphCache, "_save_graph"):
        return None
    size, stride = [int(s) for s in node.get_size()], [int(s) for s in node.get_stride()]
    offset = int(node.get_layout().offset) + tensor.storage_offset()  # the node's counts from the constant's beginning
    return tensor.as_strided(size, stride, offset)


def derived_constant(key: tuple, make: Any, name: str) -> Any:
    """An IR node for a tensor computed from constants while compiling, which becomes a constant of the graph itself.

    `make()` runs once a graph and key; the same key gives the same constant."""
    graph = load().names.V.graph
    made = graph.__dict__.setdefault("_flykernels_derived", {})
    if key not in made:
        made[key] = make()
    return graph.add_tensor_constant(made[key], name)


DERIVED = "_flykernels_packed"  # how names of derived constants end


def around_saving_graphs() -> None:
    """Frozen graphs that hold constants of ours stay out of Inductor's cache of graphs: its keys do not know frozen
    weights' values, and to another model, whose weights it puts in, it would give what was derived of the first's."""

    def wrap(original: Any) -> Any:
        def save(key: str, compiled_graph: Any, *args: Any, **kwargs: Any) -> None:
            frozen = getattr(compiled_graph, "frozen_param_names", None)
            if frozen and any(DERIVED in name for name in compiled_graph.constants or ()):
                log.info("a frozen graph with packed weights is not kept for other processes")
                return
            original(key, compiled_graph, *args, **kwargs)

        return save

    _around(load().names.FxGraphCache, "_save_graph", "this torch keeps graphs elsewhere: no weights are packed", wrap)


def define_in_wrapper(wrapper: Any, line: str) -> None:
    """Write a line once at the top of the generated Python module."""
    wrapper.add_import_once(line)


def drop_from_graph(operation_name: str, buffer_name: str) -> None:
    """Take an operation that nobody reads out of the graph being lowered."""
    graph = load().names.V.graph
    graph.removed_operations.add(operation_name)
    graph.removed_buffers.add(buffer_name)


def transposed(node: Any) -> Any:
    """The node of a matrix with its axes exchanged: a view, nothing is computed."""
    import torch

    box = node if isinstance(node, load().names.TensorBox) else load().names.TensorBox.create(node)
    return load().names.lowerings[torch.ops.aten.permute.default](box, [1, 0])


@functools.cache
def _library(key: str) -> Any:
    """Where implementations of ATen's operators for a dispatch key are registered; they last as long as it does."""
    import torch

    return torch.library.Library("aten", "IMPL", key)


def teach_scaled_shapes() -> None:
    """Let tracing accept _scaled_mm and _scaled_mm_v2 whose E8M0 scales are not swizzled, once a process."""
    import torch

    from . import scaled

    for name, unpack in (("_scaled_mm", scaled.first_version), ("_scaled_mm_v2", scaled.second_version)):
        packet = getattr(torch.ops.aten, name, None)  # _scaled_mm_v2: not in every version
        op = getattr(packet, "default", None)
        if op is None:
            continue
        key = torch._C.DispatchKey.Meta
        known = getattr(op, "py_kernels", {}).get(key)
        if known is None or getattr(known, "of_flykernels", False):
            continue
        made = scaled.meta_for(known, unpack)
        made.of_flykernels = True  # type: ignore[attr-defined]
        op.py_kernels[key] = made  # what tracing with Python's dispatcher calls
        op._dispatch_cache.clear()
        _library("Meta").impl(name, made, allow_override=True)  # and what fake tensors by themselves do


def teach_scaled_grouped() -> None:
    """Let Inductor lower _scaled_grouped_mm where ATen has no kernel, and trace and lower _scaled_grouped_mm_v2 where
    this torch has it and cannot. Once a process."""
    import torch

    from . import lower_scaled_grouped as lower

    names, aten, key = load().names, torch.ops.aten, torch._C.DispatchKey.Meta
    op: Any = lambda name: getattr(getattr(aten, name, None), "default", None)
    first, second = op("_scaled_grouped_mm"), op("_scaled_grouped_mm_v2")
    original = names.lowerings.get(first)
    falls_back: Any = getattr(names.graph, "fallback_node_due_to_unsupported_type", None)
    wanted = (original, names.fallback_handler, falls_back)
    if None in wanted or getattr(original, "of_flykernels", False):
        return
    # Inductor calls ATen for all that has E8M0 operands but a few products, of which these are none
    names.graph.fallback_node_due_to_unsupported_type = lower.but_ours(falls_back, (first, second))
    made: Any = lower.lowering(original, lambda op, *boxes: names.fallback_handler(op)(*boxes))
    made.of_flykernels = True
    names.lowerings[first] = made
    if second is None:
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key(second.name(), "Meta"):
        second.py_kernels[key] = meta = lower.second_meta(first)
        second._dispatch_cache.clear()
        _library("Meta").impl("_scaled_grouped_mm_v2", meta)
    if second not in names.lowerings:
        otherwise = lambda *args, **more: names.fallback_handler(second)(*args, **more)
        names.register_lowering(second, type_promotion_kind=None)(lower.second_lowering(made, original, otherwise))


def pointwise_follows() -> bool:
    """Whether the operation being lowered is followed by one that Inductor's own kernel of it could take in."""
    import torch

    node = getattr(load().names.V.graph, "current_node", None)
    users = list(getattr(node, "users", ()))
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
    while len(users) == 1 and users[0].target in views:
        users = list(users[0].users)
    converts = torch.ops.prims.convert_element_type.default
    return any(u.target is converts or torch.Tag.pointwise in getattr(u.target, "tags", ()) for u in users)


def is_fake(x: Any) -> bool:
    """Whether a tensor has sizes and no memory: it is being traced."""
    import torch

    return isinstance(x, torch._subclasses.FakeTensor)


def may_write(target: Any) -> bool:
    """Whether an operation of a graph may write to what it is given: it says so, or (higher-order) says nothing."""
    from torch._ops import HigherOrderOperator, OpOverload

    unsaid = isinstance(target, HigherOrderOperator)
    return unsaid or (isinstance(target, OpOverload) and target._schema.is_mutable)


def is_realized(box: Any) -> bool:
    """Whether a value lies in memory, or is still an expression."""
    return bool(load().names.ir.is_storage_and_layout(box))


def _around(owner: Any, name: str, otherwise: str, wrap: Any) -> None:
    """Puts `wrap(original)` in the place of owner.name, once however often it is asked; logs `otherwise` where this
    torch has no such name."""
    original = getattr(owner, name, None)
    if original is None:
        log.info("%s", otherwise)
    elif not getattr(original, "flykernels", False):
        ours: Any = functools.wraps(original)(wrap(original))
        ours.flykernels = True
        setattr(owner, name, ours)


def around_autotuning(when: Any, settle: Any) -> None:
    """In graphs in which `when()`: autotuning calls go on with ATen where there is no room for their tensors, which
    Inductor makes outside of what it catches (pytorch#190837), or where every single candidate failed, for which it has
    but an error; and `settle(milliseconds by choice)` has the last word."""
    cache, none_ran = load().names.get_algorithm_selector_cache(), load().names.NoValidChoicesError or ()

    def wrap(original: Any) -> Any:
        def do_autotuning(*args: Any, **kwargs: Any) -> Any:
            for attempt in (1, 2):
                try:
                    timings = original(*args, **kwargs)
                    return settle(timings) if timings and when() else timings
                except Exception as e:
                    failed = isinstance(e, none_ran)
                    known = failed or devices.out_of_memory(e)
                    aten = _aten_of(original, args, kwargs) if when() and known else None
                    if aten is None:
                        raise
                    why = "every candidate failed while" if failed else "no memory for"
                    log.warning("%s measuring %s: %s", why, aten.name, "again" if attempt == 1 else "ATen serves it")
                    if failed:
                        _forget_failed_rounds(cache)
                devices.free_memory()
            return {aten: UNMEASURED_MILLISECONDS}

        return do_autotuning

    otherwise = "this torch autotunes elsewhere: a lack of memory while measuring is not caught"
    _around(cache, "do_autotuning", otherwise, wrap)


def _forget_failed_rounds(cache: Any) -> None:
    """Inductor keeps times on disk, those of candidates that failed too: where all did, each later compilation would
    fail, and never measure again."""
    try:
        kept = cache.get_local_cache()  # operation -> inputs -> precision -> candidate -> milliseconds
        for of_inputs in (by_inputs for by_operation in kept.values() for by_inputs in by_operation.values()):
            failed = [name for name, times in of_inputs.items() if not any(map(math.isfinite, times.values()))]
            for name in failed:
                del of_inputs[name]
        cache.update_local_cache(kept)
    except (AttributeError, TypeError, ValueError, OSError) as e:
        log.info("times that Inductor keeps of candidates that failed stay: %s: %s", type(e).__name__, e)


PLAIN = {"warmup", "rep", "is_vetted_benchmarking"}  # what Inductor says of a benchmark that wants one number


def around_gpu_benchmarks(when: Any, milliseconds: Any) -> None:
    """While `when()`, the time of a run on a GPU is `milliseconds(run)`, wherever Inductor wants one: of its templates,
    with what they take in, or of its other kernels' configurations. Other wishes it sees to itself."""
    import torch

    names = load().names

    def wrap(original: Any) -> Any:
        def benchmark_gpu(self: Any, _callable: Any, *args: Any, **kwargs: Any) -> Any:
            wishes = args or not PLAIN.issuperset(kwargs)
            fixed = getattr(names.config, "deterministic", False)  # then it may refuse to measure
            if wishes or fixed or not torch.cuda.is_available() or not when():
                return original(self, _callable, *args, **kwargs)
            return milliseconds(_callable)

        return benchmark_gpu

    otherwise = "this torch times kernels elsewhere: they are timed as it does"
    _around(type(names.benchmarker), "benchmark_gpu", otherwise, wrap)


def same_ptxas_as_helpers() -> None:
    """Lets this process look for Triton's kernels as Inductor's helper processes leave them: these take torch's own
    ptxas, whose version and path are part of the cache's keys, and this process does not until it has compiled a kernel
    itself. What helpers compiled for an autotuning call was then compiled again, one after the other."""
    try:
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    except ImportError:
        log.info("this torch chooses ptxas elsewhere")
        return
    _set_triton_ptxas_path()


def compiling() -> bool:
    """Whether this thread is in the middle of compiling a graph."""
    return hasattr(load().names.V.graph, "sizevars")


def tunes_elsewhere() -> bool:
    """Whether candidates are to be run in processes of their own, because they might take this one down."""
    return bool(load().names.config.autotune_in_subproc)


def occupy_gpu(cycles: int) -> None:
    """Keeps the current stream of the current GPU busy for about so many of its cycles; what is sent meanwhile waits.
    Where this torch cannot, nothing."""
    import torch

    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)


def calls(choice: Any, sane: Any, count: int) -> list:
    """Functions without arguments that run a candidate of Inductor's own, each on tensors made for it.

    sane: (input tensors of any numbers, which call) -> such that the operation takes"""
    names = load().names
    if not isinstance(choice, names.ExternKernelCaller):
        request = choice.bmreq
        made = lambda i: sane([m.to_tensor() for m in request.input_tensor_meta], i)
        return [request.make_run_fn(*made(i), out=request.output_tensor_meta.to_tensor()) for i in range(count)]
    call, meta = choice.to_callable(), names.TensorMeta.from_irnodes
    inputs, output = meta(list(choice.input_nodes)), meta(choice.layout)
    made = lambda i: sane([m.to_tensor() for m in inputs], i)
    if choice.has_out_variant:
        return [functools.partial(call, *made(i), out=output.to_tensor()) for i in range(count)]
    return [functools.partial(call, *made(i)) for i in range(count)]


UNMEASURED_MILLISECONDS = 1.0  # stands where a time is wanted and the choice is the only one


def _aten_of(function: Any, args: tuple, kwargs: dict) -> Any:
    """The ATen candidate among the choices of a call of do_autotuning; None if there is none."""
    import inspect

    choices = inspect.signature(function).bind(*args, **kwargs).arguments.get("choices", ())
    return next((c for c in choices if isinstance(c, load().names.ExternKernelCaller)), None)


def measure_deferred(x: Any, w: Any) -> None:
    """Measures now the candidates of the products of x and w that Inductor would measure when it schedules: on a GPU it
    waits for what may be fused with them. It keeps the times, so nothing is measured twice."""
    names = load().names
    if names.MultiTemplateBuffer is None:
        return
    wanted = {x.get_name(), w.get_name()}
    for buffer in names.V.graph.buffers:
        if isinstance(buffer, names.MultiTemplateBuffer):
            inputs = {node.get_name() for node in buffer.original_inputs}
            if wanted <= inputs:
                buffer.choice_timings()


def benchmark_apart(choices: list) -> dict:
    """Milliseconds of each choice outside an autotuning call: in Inductor's tuning worker where it uses one."""
    if not choices:
        return {}
    with ThreadPoolExecutor(min(len(choices), os.cpu_count() or 1)) as threads:
        list(threads.map(lambda choice: choice.precompile(), choices))
    if tunes_elsewhere():
        from torch._inductor.autotune_process import benchmark_in_sub_process

        return benchmark_in_sub_process(choices)
    return {choice: choice.bmreq.benchmark() for choice in choices}
