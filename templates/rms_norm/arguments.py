"""What RMSNorm kernels are called with, in order: the same for every configuration of a problem, except `workspace`.

forward    x, [weight], [residual], y, [sum], [rstd]       pointers to the first element
backward   x, [weight], rstd, dy, [dsum], dx, [dweight]

then scalars:

    eps                           forward only, i32: the bits of the f32 (`eps_bits`): all arguments are integers
    rows                          i64
    width                         i64; where the problem leaves it open (x86)
    x_row, [residual_row]         i64, forward: elements from one row to the next
    x_row, dy_row, [dsum_row]     i64, backward; 0 is allowed (an expanded gradient)
    parts                         i64: what the configuration's `parts_for` says
    [workspace]                   a pointer, where the code objects' arguments name it: memory of as many bytes as the
                                  configuration's `workspace_bytes` says, aligned to 16, undefined before and after

y, sum and dx are dense with a row stride of `width`; rstd is f32, one a row; weight and dweight have unit stride.
A kernel may consist of several code objects (`build` returns them all): launch each, in order, with the same arguments.
rows = 0 writes nothing but dweight, which becomes zeros.
"""

from __future__ import annotations

import struct

from flykernels.dtypes import DType, i32, i64

from .problem import RMSNormProblem


def pointers(p: RMSNormProblem) -> tuple[str, ...]:
    """Names of the pointer arguments but the workspace, in order."""
    weight = ("weight",) if p.weight_dtype != "none" else ()
    if p.backward:
        more = ("dsum",) if p.residual else ()
        return ("x", *weight, "rstd", "dy", *more, "dx", *(("dweight",) if p.weight_gradient else ()))
    before, after = (("residual",), ("sum",)) if p.residual else ((), ())
    return ("x", *weight, *before, "y", *after, *(("rstd",) if p.rstd else ()))


def scalars(p: RMSNormProblem) -> tuple[str, ...]:
    """Names of the scalar arguments, in order."""
    names = [] if p.backward else ["eps"]
    names += ["rows", *(["width"] if p.width is None else []), "x_row"]
    names += ["dy_row"] if p.backward else []
    names += [("dsum_row" if p.backward else "residual_row")] if p.residual else []
    return (*names, "parts")


def scalar_types(p: RMSNormProblem) -> dict[str, DType]:
    """The scalar arguments as `Kernel.args` takes them."""
    return {name: i32 if name == "eps" else i64 for name in scalars(p)}


def eps_bits(eps: float) -> int:
    """The f32 nearest to eps, as the integer that has its bits."""
    return struct.unpack("<i", struct.pack("<f", eps))[0]
