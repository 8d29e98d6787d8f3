"""The kernel language: a Python function, called once, writes one kernel's MLIR (see `kernel.trace`)."""

from ..dtypes import DType, bf16, f16, f32, i32, i64, u8
from ..layout import Layout, Mode, Swizzle, ThreadValues, bank_conflicts
from .kernel import Kernel, trace
from .memory import Global, View
from .values import Value, exp2, fma, maximum, minimum, reciprocal, rsqrt, select, sqrt, sums, transpose
