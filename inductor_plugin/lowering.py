"""Which problems a model asks of the templates, found without its weights and without the GPU: its graphs go through
Inductor itself, as far as lowering, and whoever listens hears what is asked (asked.py).

With `decide` the candidates are measured meanwhile, as in the compilation that will come: that one finds them decided.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import TOKEN, install, private, private_ahead
from .asked import Heard, Listener, listening


class ModelError(ValueError):
    """Why a model cannot be looked at, in words."""


@dataclass(frozen=True)
class Program:
    """Something that torch.compile can take.

    make      () -> (function or module, positional arguments, keyword arguments), called under fake tensors
    training  forward and backward; else without gradients
    dynamic   torch.compile's: None lets tensors decide (mark_dynamic), True makes sizes symbolic
    freezing  parameters are constants: needs memory for them
    """

    make: Callable[[], tuple[Any, tuple, dict]]
    training: bool = False
    dynamic: bool | None = None
    freezing: bool = False


@dataclass
class Seen:
    """requests: what was asked of the templates, by the key's digest. failed: why graphs could not be lowered."""

    requests: dict[str, Heard] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    late: int = 0


def backends() -> str:
    """The candidates that ours are measured against: what Inductor's configuration says, and ours."""
    named = private.load().names.config.max_autotune_gemm_backends
    return named if TOKEN in install.tokens(named) else f"{named},{TOKEN}"


def lower(
    program: Program, target: str, description: dict, here: bool, decide: bool = False, deadline: float | None = None
) -> Seen:
    """Takes a program through Inductor for a target that keys describe so. Raises what making or tracing it raises.

    here    this process has the device; if not, nothing can be measured, and random numbers, padding of operands and
            attention are lowered as for a CPU's graph"""
    if not install.hook():
        raise ModelError("this torch lacks what the plugin needs")
    if missing := private_ahead.load().missing:
        raise ModelError(f"this torch lacks what looking at models needs: {', '.join(missing)}")
    gpu = target != "x86"
    listener, seen = Listener(decide and here, deadline), Seen()
    options: dict[str, Any] = {
        "max_autotune": True, "max_autotune_gemm_backends": backends() if decide else f"ATEN,{TOKEN}",
        "force_disable_caches": True,
    }  # fmt: skip
    if gpu and not here:
        options["fallback_random"] = True  # seeds would be made on the GPU
    failed = lambda e: seen.failed.append(f"{type(e).__name__}: {e}")
    compiled_by = private_ahead.backend(gpu and not here, options, failed)
    elsewhere = private_ahead.gpu_elsewhere(target, description) if gpu and not here else contextlib.nullcontext()
    frozen = private.load().names.config.patch(freezing=program.freezing)  # tracing asks for it too
    torch.compiler.reset()
    try:
        with listening(listener), private_ahead.lowering_only(), elsewhere, frozen:
            _call(program, torch.device("cuda" if gpu and here else "cpu"), compiled_by)
    finally:
        torch.compiler.reset()
    seen.requests, seen.late = listener.requests, listener.late
    return seen


def _call(program: Program, device: torch.device, compiled_by: Callable) -> None:
    """Makes the program, puts it on the device and calls it, compiled."""
    with contextlib.ExitStack() as stack:
        with private_ahead.fake_tensors() as mode, private_ahead.converting_modules():
            function, arguments, keywords = program.make()
        real = program.freezing  # constants are folded, which takes numbers
        put = (lambda x: _real(x, device)) if real else (lambda x: private_ahead.kept(x, private_ahead.like(x, device)))
        if not real:
            stack.enter_context(mode)
        if isinstance(function, torch.nn.Module):
            with private_ahead.converting_modules():
                function._apply(put)
            for module in function.modules():
                for name, value in list(vars(module).items()):
                    if isinstance(value, torch.Tensor):
                        setattr(module, name, put(value))
        move = lambda x: put(x) if isinstance(x, torch.Tensor) else x
        arguments, keywords = torch.utils._pytree.tree_map(move, (arguments, keywords))
        compiled = torch.compile(function, backend=compiled_by, dynamic=program.dynamic)
        with torch.set_grad_enabled(program.training):
            result = compiled(*arguments, **keywords)
        if program.training:
            _backward(result)


def _real(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like a fake one, with memory: random numbers, or zeros where it holds no fractions."""
    made = private_ahead.like(x, device)
    return made.normal_() if x.is_floating_point() else made.zero_()


def _backward(result: Any) -> None:
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves:
        raise ModelError("no result of the model has a gradient, so there is nothing to train")
    torch.stack([x.sum().float() for x in leaves]).sum().backward()


def from_factory(name: str, training: bool, dynamic: bool, freezing: bool) -> Program:
    """The program of `module:factory`, a function without arguments that returns (model, example inputs): a tuple of
    positional arguments, a dictionary of named ones, or one tensor. ModelError if there is none."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ModelError(f"{name!r} is not module:factory")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as e:
        raise ModelError(f"{name}: {e}") from e
    if not callable(factory):
        raise ModelError(f"{name} is {type(factory).__name__}, not a function that returns (model, example inputs)")

    def make() -> tuple[Any, tuple, dict]:
        made = factory()
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise ModelError(f"{name} returned {type(made).__name__}, not (model, example inputs)")
        model, inputs = made
        if isinstance(model, torch.nn.Module) and not training:
            model.eval()
        if isinstance(inputs, dict):
            return model, (), inputs
        return model, inputs if isinstance(inputs, tuple) else (inputs,), {}

    return Program(make, training, True if dynamic else None, freezing)
