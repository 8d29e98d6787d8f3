"""The private names of torch that a warmup needs beside private.py's: models without weights, graphs that are lowered
and no further, and GPUs that are not here.

With one missing a warmup cannot look at models, and says so; compiling is as it was. Read in torch 2.11, 2.13 and 2.14;
`tests/plugin/test_private_ahead.py` holds the contract: what each name must accept and do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import private

# name here -> "module:attribute path"
REQUIRED = {
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "GraphLowering": "torch._inductor.graph:GraphLowering",
    "compile_to_module": "torch._inductor.graph:GraphLowering.compile_to_module",
    "DeviceProperties": "torch._inductor.runtime.hints:DeviceProperties",
    "CudaInterface": "torch._dynamo.device_interface:CudaInterface",
    "mark_dynamic": "torch._dynamo:mark_dynamic",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "detect_fake_mode": "torch._guards:detect_fake_mode",
    "module_apply": "torch.nn:Module._apply",
}

# What Inductor asks of a GPU's properties beside its name, by target: sizes decide how reductions are split. From
# rocminfo of an MI350X and from an H200.
PROPERTIES: dict[str, dict[str, Any]] = {
    "gfx950": {
        "major": 9, "minor": 5, "warp_size": 64, "total_memory": 288 << 30, "regs_per_multiprocessor": 65536 * 2,
        "max_threads_per_multi_processor": 2048, "shared_memory_per_block": 160 << 10, "L2_cache_size": 4 << 20,
    },
    "sm90a": {
        "major": 9, "minor": 0, "warp_size": 32, "total_memory": 141 << 30, "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048, "shared_memory_per_block": 48 << 10, "L2_cache_size": 50 << 20,
    },
}  # fmt: skip


class _Lowered(BaseException):
    """A graph is lowered. Not an Exception: Inductor wraps those."""


@functools.cache
def load() -> private.Private:
    """The names above. Never raises."""
    return private.collect(REQUIRED, {})


def fake_tensors() -> Any:
    """A context in which tensors have sizes and no memory."""
    return load().names.FakeTensorMode(allow_non_fake_inputs=True)


def symbolic(x: torch.Tensor, axis: int) -> None:
    """torch.compile takes the tensor's size along this axis for unknown."""
    load().names.mark_dynamic(x, axis)


def kept(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """`made` with what the user marked on `x`."""
    for name, value in vars(x).items() if hasattr(x, "__dict__") else ():
        if name.startswith("_dynamo_"):
            setattr(made, name, value)
    return made.requires_grad_(x.requires_grad) if x.is_floating_point() else made


@contextlib.contextmanager
def converting_modules() -> Iterator[None]:
    """`nn.Module.to()` and its like exchange parameters; torch's own wants to swap what fake tensors do not let go."""

    def apply(self: Any, change: Callable, recurse: bool = True, made: dict | None = None) -> Any:
        # Tied parameters stay tied. What was replaced is kept meanwhile, so that its id is nobody else's.
        made = {} if made is None else made
        for child in self.children() if recurse else ():
            child._apply(change, made=made)
        for held in (self._parameters, self._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if id(value) not in made:
                    with torch.no_grad():
                        new = change(value)
                    if isinstance(value, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, value.requires_grad)
                    made[id(value)] = value, new
                held[name] = made[id(value)][1]
        return self

    with mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def gpu_elsewhere(target: str, description: dict) -> Iterator[None]:
    """Inductor finds a GPU of that description where it asks for one: enough to lower a graph, not to run it."""
    interface, properties_of = load().names.CudaInterface, load().names.DeviceProperties
    found = SimpleNamespace(
        name=description["product"], gcnArchName=description["arch"],
        multi_processor_count=description["compute_units"], **PROPERTIES[target],
    )  # fmt: skip
    properties, current = (lambda *_: found), (lambda *_: 0)
    capability = lambda *_: (found.major, found.minor)
    forget = getattr(properties_of.create, "cache_clear", lambda: None)
    forget()
    with contextlib.ExitStack() as stack:
        patch = lambda *x, **y: stack.enter_context(mock.patch.object(*x, **y))
        patch(torch.version, "hip", "7.0" if target == "gfx950" else None)
        patch(torch.cuda, "current_device", current)
        patch(torch.cuda, "get_device_properties", properties)
        patch(torch.cuda, "get_device_capability", capability)
        patch(interface, "is_bf16_supported", staticmethod(lambda *_, **__: True))
        for owner in (interface, interface.Worker):
            patch(owner, "get_device_properties", staticmethod(properties))
            patch(owner, "current_device", staticmethod(current))
        try:
            yield
        finally:
            forget()


def on_gpu(graph: Any, inputs: Sequence[Any]) -> list[Any]:
    """Puts a traced graph, in place, and its fake inputs on the first GPU, whether there is one or not."""
    device = torch.device("cuda", 0)
    move = lambda x: device if isinstance(x, torch.device) else x
    for node in graph.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, move)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move)
    graph.recompile()
    mode = load().names.detect_fake_mode(inputs)
    with mode if mode is not None else contextlib.nullcontext():
        return [like(x, device) if isinstance(x, torch.Tensor) else x for x in inputs]


def like(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same sizes, strides and type on a device."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)


def backend(gpu: bool, options: dict, failed: Callable[[Exception], None]) -> Callable:
    """A backend of torch.compile that takes every graph through Inductor as far as lowering, and then runs it as it was
    traced (on fake tensors: not at all).

    gpu      the graphs are to be lowered for a GPU that is not here
    failed   told of graphs that could not be lowered"""
    names = load().names

    def inner(graph: Any, inputs: Sequence[Any], **more: Any) -> Any:
        kept = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # constants are not copied
        try:
            given = on_gpu(graph, inputs) if gpu else inputs
            with names.unset_fake_temporarily():  # what is measured is measured on real tensors
                names.compile_fx_inner(graph, given, **more)
        except _Lowered:
            pass
        except Exception as e:
            failed(e)

        def run(arguments: Any) -> Any:
            arguments_, left = list(arguments), arguments
            if isinstance(left, list):
                left.clear()
            return kept(*arguments_)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return lambda graph, inputs: names.compile_fx(graph, inputs, inner_compile=inner, config_patches=options)


@contextlib.contextmanager
def lowering_only() -> Iterator[None]:
    """Inductor stops once a graph is lowered, and the choices that it puts off are made: no code is generated."""
    deferred = private.load().names.MultiTemplateBuffer

    def stop(graph: Any) -> Any:
        if deferred is not None:
            for buffer in graph.buffers:
                if isinstance(buffer, deferred):
                    buffer.choice_timings()
        raise _Lowered

    with mock.patch.object(load().names.GraphLowering, "compile_to_module", stop):
        yield
