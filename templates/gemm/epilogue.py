"""What happens to a sum before it is written: bias, activation, residual. Shared by all targets.

Every function takes f32 Values (scalars or vectors) or Fragments, and gives the same back. Errors are those of
`flykernels.lang.functions`. NaN stays NaN, and infinities give what ATen gives (by pairs, gelu_tanh leaves minus
infinity as it is)."""

from __future__ import annotations

from flykernels.dtypes import f32
from flykernels.lang.functions import gelu, gelu_tanh, gelu_tanh_by_pairs, relu, silu

ACTIVATION = {"none": lambda x: x, "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


BY_PAIRS = {**ACTIVATION, "gelu_tanh": gelu_tanh_by_pairs}


def activate(kind: str, x, by_pairs: bool = False):
    """One of problem.ACTIVATIONS of x. by_pairs: x are vectors of an even width, and reciprocals are slow."""
    return (BY_PAIRS if by_pairs else ACTIVATION)[kind](x)


def finish(acc, bias=None, activation: str = "none", residual=None, by_pairs: bool = False):
    """activation(acc + bias) + residual, in f32; bias and residual of any float type, like acc or absent."""
    out = acc if bias is None else acc + bias.to(f32)
    out = activate(activation, out, by_pairs)
    return out if residual is None else out + residual.to(f32)
