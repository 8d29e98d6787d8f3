"""The kernel language: a Python function, called once, writes one kernel's MLIR (see `kernel.trace`)."""

from ..dtypes import DType, bf16, f16, f32, i8, i16, i32, i64, u8, u32, u64
from ..layout import Layout, Mode, Swizzle, ThreadValues, bank_conflicts
from .collective import Tally, atomic, over_lanes
from .errors import TraceError
from .kernel import Kernel, trace
from .memory import Global, View
from .values import (
    Value,
    absolute,
    constant,
    exp2,
    fma,
    maximum,
    maximum_or_nan,
    minimum,
    popcount,
    reciprocal,
    rsqrt,
    select,
    sqrt,
    sums,
    transpose,
)

__all__ = [
    "DType",
    "Global",
    "Kernel",
    "Layout",
    "Mode",
    "Swizzle",
    "Tally",
    "ThreadValues",
    "TraceError",
    "Value",
    "View",
    "absolute",
    "atomic",
    "bank_conflicts",
    "bf16",
    "constant",
    "exp2",
    "f16",
    "f32",
    "fma",
    "i8",
    "i16",
    "i32",
    "i64",
    "maximum",
    "maximum_or_nan",
    "minimum",
    "over_lanes",
    "popcount",
    "reciprocal",
    "rsqrt",
    "select",
    "sqrt",
    "sums",
    "trace",
    "transpose",
    "u8",
    "u32",
    "u64",
]
