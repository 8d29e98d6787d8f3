"""The kernel language: a Python function, called once, writes one kernel's MLIR (see `kernel.trace`)."""

from ..dtypes import DType, bf16, f16, f32, i8, i16, i32, i64, u8, u32, u64
from ..layout import Layout, Mode, Swizzle, ThreadValues, bank_conflicts
from .kernel import Kernel, trace
from .memory import Global, View
from .values import Value, constant, exp2, maximum, minimum, reciprocal, rsqrt, select, sqrt

__all__ = [  # noqa: RUF022 grouped as above
    "DType",
    "bf16",
    "f16",
    "f32",
    "i8",
    "i16",
    "i32",
    "i64",
    "u8",
    "u32",
    "u64",
    "Layout",
    "Mode",
    "Swizzle",
    "ThreadValues",
    "bank_conflicts",
    "Kernel",
    "trace",
    "Global",
    "View",
    "Value",
    "constant",
    "exp2",
    "maximum",
    "minimum",
    "reciprocal",
    "rsqrt",
    "select",
    "sqrt",
]
