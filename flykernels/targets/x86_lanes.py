"""Moving lanes and bits about by conditions on x86: BMI2's pdep and pext, AVX2's vpermd, AVX-512's vpcompressd.

Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2."""

from __future__ import annotations

from ..dtypes import DType, u32, u64
from ..lang.values import Value, constant, mlir_type
from ..mlir import intrinsic

BYTES_0_TO_7, LOW_BITS = 0x0706050403020100, 0x0101010101010101
Byte = DType("u8", 8, False)


def deposit(bits: Value, mask: Value) -> Value:
    """The low bits of `bits`, one after the other, at the places where `mask` has ones (u32): pdep."""
    return Value(intrinsic("llvm.pdep.i32", mlir_type(u32), bits, mask), u32)


def compress(v: Value, mask: Value) -> Value:
    """The lanes of a vector of 8 or 16 32-bit elements whose bits are set in the u32 `mask`, moved to the front.

    What is behind them may be anything."""
    kind = mlir_type(v.dtype, v.width)
    if v.width == 16:
        chosen = mask.to(DType("u16", 16, False)).bitcast(DType("i1", 1, False), 16)
        return Value(intrinsic("llvm.x86.avx512.mask.compress", kind, v, v, chosen), v.dtype, v.width)
    # a byte for each bit, then the numbers of the lanes whose byte is set, packed: 8 bytes in one scalar register
    wide = Value(intrinsic("llvm.pdep.i64", mlir_type(u64), mask.to(u64), constant(LOW_BITS, u64)), u64) * 255
    lanes = Value(intrinsic("llvm.pext.i64", mlir_type(u64), constant(BYTES_0_TO_7, u64), wide), u64)
    return Value(
        intrinsic("llvm.x86.avx2.permd", kind, v, lanes.bitcast(Byte, v.width).to(u32)), v.dtype, v.width
    )
