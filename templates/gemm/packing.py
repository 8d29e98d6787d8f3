"""A constant B, packed ahead of time as an x86 panel kernel reads it, and back. Needs no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flykernels.dtypes import bf16

from .problem import GemmProblem


def packing(problem: GemmProblem, config: Any) -> tuple:
    """What decides how a packed B looks: configurations that agree in it can share one."""
    return (_get(config, "columns"), _get(config, "unroll"), packed_shape(problem, config))


def packed_shape(problem: GemmProblem, config: Any) -> tuple[int, ...]:
    """Shape of a B packed ahead; K is filled up with zeros to a multiple of `unroll`, N to one of `columns`.

    (panel, step, column); of bf16 (panel, pair of steps, column, 2), so that one 32-bit word holds two steps."""
    columns, unroll = _get(config, "columns"), _get(config, "unroll")
    panels, steps = -(-problem.n // columns), -(-problem.k // unroll) * unroll
    pairs = problem.input_type == bf16
    return (panels, steps // 2, columns, 2) if pairs else (panels, steps, columns)


def pack_b(problem: GemmProblem, config: Any, b: Any) -> Any:
    """A constant B as the kernel of a problem with `packed_b` wants it.

    b: a torch tensor (K, N), any strides. The result: a new contiguous tensor of b's type and device, `packed_shape`.
    config: an X86Config or its key(). ValueError if b has another shape."""
    if tuple(b.shape) != (problem.k, problem.n):
        raise ValueError(f"B is {tuple(b.shape)}, but the problem has (K, N) = {(problem.k, problem.n)}")
    shape, columns = packed_shape(problem, config), _get(config, "columns")
    panels, steps = shape[0], shape[1] * (2 if len(shape) == 4 else 1)
    filled = b.new_zeros((steps, panels * columns))
    filled[: problem.k, : problem.n] = b
    if len(shape) == 4:
        return filled.reshape(steps // 2, 2, panels, columns).permute(2, 0, 3, 1).contiguous()
    return filled.reshape(steps, panels, columns).permute(1, 0, 2).contiguous()


def unpack_b(problem: GemmProblem, config: Any, packed: Any) -> Any:
    """The (K, N) matrix that `pack_b` was given, as a new tensor. ValueError if `packed` has another shape."""
    shape = packed_shape(problem, config)
    if tuple(packed.shape) != shape:
        raise ValueError(f"a packed B of shape {tuple(packed.shape)}; this problem and configuration have {shape}")
    if len(shape) == 4:
        steps = packed.permute(1, 3, 0, 2).reshape(shape[1] * 2, shape[0] * shape[2])
    else:
        steps = packed.permute(1, 0, 2).reshape(shape[1], shape[0] * shape[2])
    return steps[: problem.k, : problem.n]


def _get(config: Any, field: str) -> int:
    return config[field] if isinstance(config, Mapping) else getattr(config, field)
